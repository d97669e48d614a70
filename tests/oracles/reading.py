"""Read an oracle directory: its notes and its reference tensors.

Owns the file names of the reference. Must not know how a directory was made: one written by another
script with the same names and keys serves as well.
Invariant: nothing here changes a directory.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    # Not at run time: the fixtures load with every pytest, most of which need no torch.
    from torch import Tensor

NOTES_FILE = "reference.json"
TENSORS_FILE = "reference.safetensors"

__all__ = ["NOTES_FILE", "TENSORS_FILE", "Oracle", "open_oracle"]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Hold one oracle directory: a checkpoint, plus reference tensors that are read on demand."""

    directory: Path
    model_type: str
    notes: dict[str, object]
    keys: frozenset[str]

    def tensor(self, key: str) -> "Tensor":
        """Read one reference tensor; a KeyError names the key that the directory lacks."""
        if key not in self.keys:
            raise KeyError(f"{self.directory / TENSORS_FILE} has no tensor {key!r}")
        with safe_open(self.directory / TENSORS_FILE, "pt") as file:
            return file.get_tensor(key)

    def has(self, *keys: str) -> bool:
        """Tell whether the directory holds all of `keys`; some scripts write fewer than others."""
        return self.keys.issuperset(keys)


def open_oracle(directory: Path) -> Oracle:
    """Open a directory that holds `config.json`, `reference.json` and `reference.safetensors`."""
    config = json.loads((directory / "config.json").read_text())
    notes = json.loads((directory / NOTES_FILE).read_text())
    with safe_open(directory / TENSORS_FILE, "pt") as file:
        keys = frozenset(file.keys())
    return Oracle(directory, config["model_type"], notes, keys)
