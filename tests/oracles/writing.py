"""Write checkpoint directories: tokenizer, shards with an index, reference files.

Owns the layout of a Hugging Face directory. Must not know any model.
Invariant: every tensor is written once, in one shard, and the index names that shard.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.oracles.reading import NOTES_FILE, TENSORS_FILE

INDEX_FILE = "model.safetensors.index.json"

__all__ = [
    "byte_tokenizer",
    "take_shards",
    "write_json",
    "write_reference",
    "write_shards",
]


def byte_tokenizer(
    specials: Sequence[str], end_of_text: str, chat_template: str
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with ids 0..255 for bytes (in alphabet order), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_text,
        pad_token=end_of_text,
        chat_template=chat_template,
    )


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def take_shards(directory: Path) -> dict[str, Tensor]:
    """Read every tensor of `directory` into memory and remove its weight files and index."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        file.unlink()
    (directory / INDEX_FILE).unlink(missing_ok=True)
    return tensors


def write_shards(
    directory: Path,
    tensors: Mapping[str, Tensor],
    shard_bytes: int,
    last_shard: Sequence[str] = (),
) -> None:
    """Write shards of about `shard_bytes`; tensors named in `last_shard` go into one at the end."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if name in last_shard:
            continue
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    if last_shard:
        shards.append({name: tensors[name].contiguous() for name in last_shard})
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_reference(
    directory: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, object]
) -> None:
    """Write the reference tensors and, beside them, the notes with every tensor's shape."""
    kept = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    assert all(torch.isfinite(t).all() for t in kept.values() if t.is_floating_point())
    save_file(kept, directory / TENSORS_FILE)
    shapes = {name: list(tensor.shape) for name, tensor in kept.items()}
    write_json(directory / NOTES_FILE, {**notes, "shapes": shapes})
