"""Write what the reference video processor does with small clips, for machines without torchvision.

    python -m tests.oracles.video_golden

Owns `tests/golden/video_reference.*`. Needs torchvision (transformers' `Glm5NextVideoProcessor`
imports it); the tests that read the files do not. Must not know Oxplow.
Invariant: the clips are `clip_frames`, a formula, so the files hold only what the reference made.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[1] / "golden"
RATES = (0.5, 1, 1.5, 2, 2.5, 3, 7.3, 10, 12, 24000 / 1001, 24, 25, 30000 / 1001, 30, 60, 240)
LENGTHS = (1, 2, 3, 5, 8, 13, 24, 49, 100, 241)
LONG_CLIPS = ((7192, 30000 / 1001), (40000, 30), (100000, 60), (2049, 1), (4097, 2))
# (frames, height, width): enlarged, odd and enlarged, and neither.
CLIPS = ((2, 60, 76), (3, 20, 30), (6, 60, 76))

__all__ = ["CLIPS", "clip_frames", "digest"]


def clip_frames(num_frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return [num_frames, height, width, 3]: ramps with sharp edges, other in every frame."""
    i, y, x, c = np.ogrid[:num_frames, :height, :width, :3]
    return ((11 * i + 5 * y + 3 * x + 50 * c + x * y) % 256).astype(np.uint8)


def digest(indices: list[int]) -> str:
    """Return a short name for a long list of indices."""
    return hashlib.sha256(json.dumps(indices).encode()).hexdigest()


def main() -> None:
    """Write the two golden files."""
    import torchvision
    import transformers
    from transformers.models.glm5_next.video_processing_glm5_next import Glm5NextVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Glm5NextVideoProcessor()

    def sample(num_frames: int, fps: float) -> list[int]:
        seconds = num_frames / fps
        metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=seconds)
        return processor.sample_frames(metadata).tolist()

    short = [[n, fps, sample(n, fps)] for n in LENGTHS for fps in RATES]
    long = [[n, fps, digest(sample(n, fps))] for n, fps in LONG_CLIPS]
    levels, grids = {}, []
    mean = torch.tensor(processor.image_mean).view(3, 1, 1, 1)
    std = torch.tensor(processor.image_std).view(3, 1, 1, 1)
    for shape in CLIPS:
        frames = torch.from_numpy(clip_frames(*shape).transpose(0, 3, 1, 2).copy())
        out = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        rows = out["pixel_values_videos"].view(-1, 3, 2, 14, 14)
        name = "x".join(str(side) for side in shape)
        levels[name] = ((rows * std + mean) * 255).round().to(torch.uint8).flatten(1)
        grids.append([*shape, out["video_grid_thw"][0].tolist()])
    save_file(levels, GOLDEN / "video_reference.safetensors")
    header = {
        "command": "python -m tests.oracles.video_golden",
        "transformers": transformers.__version__,
        "torchvision": torchvision.__version__,
        "dtype": "8-bit levels, recovered from fp32 rows",
    }
    parts = {"short_clips": short, "long_clips": long, "grids": grids}
    (GOLDEN / "video_reference.json").write_text(_one_case_a_line(header, parts))


def _one_case_a_line(header: dict[str, str], parts: dict[str, list[list[object]]]) -> str:
    """Return JSON whose cases can be read and compared line by line."""
    lines = [f' "header": {json.dumps(header)}']
    for name, cases in parts.items():
        listed = ",\n".join(f"  {json.dumps(case)}" for case in cases)
        lines.append(f' "{name}": [\n{listed}\n ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
