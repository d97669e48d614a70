"""Reads a released-layout checkpoint back into a training state.

Owns the inverse of `export`. Invariant: exporting what was read gives the same tensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.export import released_tensors
from training.model import Nano


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the folder's shards by released name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(file)
    return tensors


@torch.no_grad()
def load_checkpoint(model: Nano, folder: Path) -> None:
    """Copy a checkpoint into the model: every released tensor is a view of a training tensor or a
    known reshape of one.

    Raises: KeyError for a missing tensor.
    """
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = read_shards(folder)
    for name, view in released_tensors(state, model.shape):
        value = tensors[name].float()
        if name.endswith("patch_embed.proj.weight"):
            still = value.sum(2).reshape(state["vision.patch"].shape)
            state["vision.patch"].copy_(still)
        elif name.endswith("downsample.weight"):
            merged = value.permute(0, 2, 3, 1).reshape(state["vision.merge"].shape)
            state["vision.merge"].copy_(merged)
        else:
            view.copy_(value)
    model.load_state_dict(state)
