"""Muon for the matrices, AdamW for the rest.

Owns the update of fp32 masters. It must not know the loss. Invariants: no host synchronisation in
`step`, so that it can be captured; the learning-rate factor is a tensor; the state can be saved and
restored.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05
ADAM_RATE = 2e-3
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NOT_MUON = ("conv", "router", "site1", "site2", "mixer.beta", "indexer")
MUON_ROOMS = ("blocks.", "mtp.", "mtp_join", "vision.")


def is_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon trains the parameter: a matrix inside the network, not a gate, router,
    mHC or indexer part.
    """
    return (
        parameter.ndim >= 2 and name.startswith(MUON_ROOMS) and not any(s in name for s in NOT_MUON)
    )


def orthogonalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return five Newton-Schulz steps to the nearest orthogonal matrix; x [N, rows <= cols]."""
    a, b, c = NEWTON_SCHULZ
    x = x.to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Optimiser:
    """Both optimisers behind one `step`; every expert, and q, k, v, is a matrix of its own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, capturable: bool) -> None:
        named = list(model.named_parameters())
        self.matrices = [p for name, p in named if is_muon(name, p)]
        self.rest = [p for name, p in named if not is_muon(name, p)]
        device = named[0][1].device
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.factor, self.dtype = torch.ones((), device=device), dtype
        rate = torch.tensor(ADAM_RATE, device=device) if capturable else ADAM_RATE
        self.adam = torch.optim.AdamW(
            self.rest,
            lr=rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
            capturable=capturable,
        )

    def set_factor(self, factor: float) -> None:
        """Scale both learning rates."""
        self.factor.fill_(factor)
        for group in self.adam.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(ADAM_RATE * factor)
            else:
                group["lr"] = ADAM_RATE * factor

    def step(self) -> Tensor:
        """Update every parameter from its gradient, drop the gradients, return the norm of the
        AdamW part.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        self.adam.step()
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = {}
        for parameter, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.lerp_(parameter.grad, 1 - MUON_MOMENTUM)
            update = parameter.grad.lerp(momentum, MUON_MOMENTUM)
            update = update.reshape(-1, *parameter.shape[-2:])
            tall = update.shape[1] > update.shape[2]
            key = tuple(sorted(update.shape[1:]))
            groups.setdefault(key, []).append((parameter, update.mT if tall else update, tall))
        for members in groups.values():
            self._apply(members)
        self.adam.zero_grad(set_to_none=True)
        for parameter in self.matrices:
            parameter.grad = None
        return norm

    def _apply(self, members: list[tuple[Tensor, Tensor, bool]]) -> None:
        joined = orthogonalise(torch.cat([update for _, update, _ in members]), self.dtype)
        parts = joined.split([len(update) for _, update, _ in members])
        for (parameter, _, tall), part in zip(members, parts, strict=True):
            part = part.mT if tall else part
            size = max(1.0, part.shape[1] / part.shape[2]) ** 0.5
            parameter.data.mul_(1 - self.factor * (MUON_RATE * MUON_DECAY))
            parameter.data.sub_(part.reshape(parameter.shape) * (self.factor * (MUON_RATE * size)))

    def state_dict(self) -> dict[str, object]:
        """Return everything needed to go on later."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a saved state of the same model."""
        for mine, saved in zip(self.momenta, state["momenta"], strict=True):
            mine.copy_(saved)
        rates = [group["lr"] for group in self.adam.param_groups]
        self.adam.load_state_dict(state["adam"])
        for group, rate in zip(self.adam.param_groups, rates, strict=True):
            group["lr"] = rate
