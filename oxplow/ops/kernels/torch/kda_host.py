"""KDA steps on a CPU, with few torch calls.

Owns steps of rows that all live; `kda` does the rest, and all of the deterministic mode. Knows the
contracts' names and shapes, not the model. Invariant: float32 inside, the window and the state are
updated where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.kernels.torch.kda import kda_decode, kda_gate, short_conv_decode
from oxplow.ops.kernels.torch.kda_chunk import L2_EPS
from oxplow.ops.table import Kernel


def kda_gate_host(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> Tensor:
    """Compute the bounded gate with the library's sigmoid; `kda_gate` does the other one."""
    if lower_bound is None:
        return kda_gate(f, a_log, dt_bias, lower_bound=lower_bound)
    raw = torch.add(f.float(), dt_bias)
    return raw.mul_(a_log.exp().unsqueeze(1)).sigmoid_().mul_(lower_bound)


def short_conv_decode_host(
    x: Tensor, weight: Tensor, window: Tensor, state_slots: Tensor
) -> Tensor:
    """Take a step for float32 rows that all live; `short_conv_decode` does more.

    Windows that follow one another are moved where they lie, others in a copy.
    """
    slots, history = state_slots.tolist(), window.shape[2]
    if not slots or min(slots) < 0 or history == 0 or not _all_float32(x, weight, window):
        return short_conv_decode(x, weight, window, state_slots)
    held = _neighbours(window, slots)
    kept = held if held is not None else window.index_select(0, state_slots)  # [N, C, W-1]
    past = torch.mul(kept, weight[:, :history]).view(-1, history)
    total = torch.mv(past, past.new_ones(history)).view(x.shape).addcmul_(x, weight[:, history])
    # over channels and taps in one run, the window moves by one place; then the last tap is filled
    line = kept.view(x.shape[0], -1)
    line[:, :-1].copy_(line[:, 1:].clone())
    kept[:, :, -1].copy_(x)
    if held is None:
        window.index_copy_(0, state_slots.long(), kept)
    return functional.silu(total, inplace=True)


def kda_decode_host(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> Tensor:
    """Advance float32 rows that all live; `kda_decode` does more.

    The decayed state S is read once for both: with c the correction, (S + c k') q = S q + c (k q).
    States that follow one another are updated where they lie, others in a copy.
    """
    slots = state_slots.tolist()
    if not slots or min(slots) < 0 or not _all_float32(q, k, v):
        return kda_decode(q, k, v, g, beta, state, state_slots)
    held = _neighbours(state, slots)
    S = held if held is not None else state.index_select(0, state_slots)  # [N, H, V, K]
    (N, H, K), V = q.shape, v.shape[2]
    both = torch.stack((k, q), 2)  # [N, H, 2, K]
    both.mul_((both * both).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())
    S.mul_(g.exp().unsqueeze(2))
    turned = S.view(N * H, V, K).transpose(1, 2)
    read = torch.bmm(both.view(N * H, 2, K), turned).view(N, H, 2, V)
    correction = torch.sub(v, read[:, :, 0]).mul_(beta.unsqueeze(2))  # [N, H, V]
    S.addcmul_(correction.unsqueeze(3), both[:, :, :1])
    if held is None:
        state.index_copy_(0, state_slots.long(), S)
    cross = torch.mul(both[:, :, 0], both[:, :, 1]).sum(-1, keepdim=True)
    return torch.addcmul(read[:, :, 1], correction, cross).mul_(K**-0.5)


def _neighbours(pool: Tensor, slots: list[int]) -> Tensor | None:
    """Return the entries as a view where they stand one after the other and side by side."""
    begin, count = slots[0], len(slots)
    if count > 1 and slots != list(range(begin, begin + count)):
        return None
    held = pool.narrow(0, begin, count)
    return held if held.is_contiguous() else None


def _all_float32(*tensors: Tensor) -> bool:
    return all(t.dtype is torch.float32 for t in tensors)


KERNELS = (
    Kernel(op="kda_gate", name="torch-host", run=kda_gate_host, supports=on_host, rank=1),
    Kernel(
        op="short_conv_decode",
        name="torch-host",
        run=short_conv_decode_host,
        supports=on_host,
        rank=1,
    ),
    Kernel(op="kda_decode", name="torch-host", run=kda_decode_host, supports=on_host, rank=1),
)
