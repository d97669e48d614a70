"""What a checkpoint directory says about itself, read without torch.

Owns the reading of `config.json` and `processor_config.json` for the front. Knows no weights.
Invariant: the front and its workers take every id and limit from here, so they agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxplow.errors import ConfigError
from oxplow.serve.images import ImageSettings
from oxplow.serve.placeholders import MediaTokens
from oxplow.serve.video import VideoSettings

__all__ = ["ModelFiles", "default_model", "read_model_files"]

_NANO = Path(__file__).resolve().parents[1] / "models" / "nano"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Hold a checkpoint's facts. `media` is None for a model without a vision tower."""

    directory: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int | None
    media: MediaTokens | None
    image: ImageSettings
    video: VideoSettings

    @property
    def tokenizer_path(self) -> Path:
        """Return where the tokenizer is."""
        return self.directory / "tokenizer.json"


def default_model() -> Path:
    """Return the bundled model. Raises ConfigError where it is not bundled."""
    if (_NANO / "config.json").exists():
        return _NANO
    raise ConfigError(
        "no model is bundled with this copy of Oxplow",
        wanted="--model DIR, a folder with config.json, tokenizer.json and *.safetensors",
        where=_NANO,
    )


def read_model_files(directory: Path) -> ModelFiles:
    """Read a checkpoint's configuration. Raises ConfigError naming the file."""
    config = _read(directory / "config.json", required=True)
    processor = _read(directory / "processor_config.json", required=False)
    if not processor:
        processor = _read(directory / "preprocessor_config.json", required=False)
    text = config.get("text_config") or config
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError("vocab_size is missing", got=vocab_size, where=directory / "config.json")
    eos = text.get("eos_token_id", config.get("eos_token_id", ()))
    return ModelFiles(
        directory=directory,
        vocab_size=vocab_size,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
        max_positions=text.get("max_position_embeddings"),
        media=_media_tokens(config),
        image=ImageSettings.from_processor_config(processor),
        video=VideoSettings.from_processor_config(processor),
    )


def _media_tokens(config: Mapping[str, Any]) -> MediaTokens | None:
    names = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id")
    ids = [config.get(name) for name in names]
    if not config.get("vision_config") or not all(isinstance(i, int) for i in ids):
        return None
    image, video, start, end = (int(i) for i in ids if i is not None)
    return MediaTokens(image=image, video=video, image_start=start, image_end=end)


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ConfigError(
            "this folder holds no model",
            got=f"no {path.name}",
            wanted="a folder with config.json, tokenizer.json and *.safetensors",
            where=path.parent,
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}", where=path.parent) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is not an object", where=path.parent)
    return content
