"""A checkpoint folder without weights: what the front reads, and nothing else.

Owns the files. Must not know the engine.
Invariant: one token is one byte, and the marks of the GLM format have ids of their own.
"""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|image|>", "<|video|>",
)  # fmt: skip
ID = {name: 256 + i for i, name in enumerate(SPECIALS)}
EOS = [ID["<|endoftext|>"], ID["<|user|>"], ID["<|observation|>"]]
VOCAB_SIZE = 320


def write_model_files(folder: Path, *, has_vision: bool = True) -> Path:
    """Write tokenizer, template and configs into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(ROOT / "training/chat_template.jinja", folder / "chat_template.jinja")
    config = {
        "model_type": "glm5_next",
        "text_config": {
            "vocab_size": VOCAB_SIZE,
            "eos_token_id": EOS,
            "max_position_embeddings": 1 << 20,
        },
        "image_token_id": ID["<|image|>"],
        "video_token_id": ID["<|video|>"],
        "image_start_token_id": ID["<|begin_of_image|>"],
        "image_end_token_id": ID["<|end_of_image|>"],
    }
    if has_vision:
        config["vision_config"] = {"patch_size": 14}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
