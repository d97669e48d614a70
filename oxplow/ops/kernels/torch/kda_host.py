"""KDA for one token on a CPU, with few torch calls.

Owns the forms for one row; `kda` does the rest, and all of the deterministic mode. Knows the
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
    """Take a step for one float32 row, its window moved in place; `short_conv_decode` does more."""
    if x.shape[0] != 1 or not _all_float32(x, weight, window):
        return short_conv_decode(x, weight, window, state_slots)
    slot, history = state_slots.tolist()[0], window.shape[2]
    held = window[slot] if slot >= 0 else window[:0]
    if slot < 0 or history == 0 or not held.is_contiguous():
        return short_conv_decode(x, weight, window, state_slots)
    row = x[0]
    past = torch.mul(held, weight[:, :history])
    total = torch.mv(past, past.new_ones(history)).addcmul_(row, weight[:, history])
    # over channels and taps in one run, the window moves by one place; then the last tap is filled
    line = held.view(-1)
    line[:-1].copy_(line[1:].clone())
    held[:, -1].copy_(row)
    return functional.silu(total, inplace=True).unsqueeze(0)


def kda_decode_host(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> Tensor:
    """Advance one float32 row in place in its slot; `kda_decode` does more.

    The decayed state S is read once for both: with c the correction, (S + c k') q = S q + c (k q).
    """
    if q.shape[0] != 1 or not _all_float32(q, k, v):
        return kda_decode(q, k, v, g, beta, state, state_slots)
    slot = state_slots.tolist()[0]
    S = state[slot] if slot >= 0 else state[:0]
    if slot < 0 or not S.is_contiguous():
        return kda_decode(q, k, v, g, beta, state, state_slots)
    both = torch.stack((k[0], q[0]), 1)  # [H, 2, K]
    both.mul_((both * both).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())
    S.mul_(g[0].exp().unsqueeze(1))
    read = torch.bmm(both, S.transpose(1, 2))  # [H, 2, V]
    correction = torch.sub(v[0], read[:, 0]).mul_(beta[0].unsqueeze(1))  # [H, V]
    S.addcmul_(correction.unsqueeze(2), both[:, :1])
    cross = torch.mul(both[:, 0], both[:, 1]).sum(-1, keepdim=True)
    o = read[:, 1].addcmul_(correction, cross)
    return o.mul_(q.shape[2] ** -0.5).unsqueeze(0)


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
