"""Latent attention and pool keys for a few decode rows on a CPU, with few torch calls.

Owns the forms for one token of each sequence; `mla` and `index` do the rest. Knows the contracts'
names and shapes, not the model. Invariant: lengths, slots and blocks are read on the host, so
memory that holds no token is never read, and nothing is written but what the contract names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.kernels.torch.index import pool_keys_write
from oxplow.ops.kernels.torch.mla import GATHER_ELEMENTS, dense_mla, latent_write
from oxplow.ops.table import Kernel

_FEW_ROWS = 16  # rows that are visited one by one


def latent_write_host(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Write a few latents to their slots, row by row; `latent_write` does more."""
    slots = slot_mapping.tolist() if latent.shape[0] <= _FEW_ROWS else []
    if not slots or not cache.is_contiguous():
        latent_write(latent, slot_mapping, cache)
        return
    rows = cache.view(-1, cache.shape[2])
    for i, slot in enumerate(slots):
        if slot >= 0:
            rows[slot].copy_(latent[i])


def dense_mla_host(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Attend one query of each of a few sequences in one tile a row; `dense_mla` does more.

    Memory: float32 copies of what is narrower, and one sequence's latents side by side (at most
    GATHER_ELEMENTS floats).
    """
    (T, H, Dq), (size, width) = query.shape, cache.shape[1:]
    (_, Dn, R), cached = w_uk.shape, computed_tokens.tolist()
    if not (
        0 < T == len(cached) <= _FEW_ROWS
        and cu_seqlens.tolist() == list(range(T + 1))
        and (max(cached) + 1) * width <= GATHER_ELEMENTS
        and cache.is_contiguous()
    ):
        return dense_mla(query, w_uk, w_uv, cache, block_table, computed_tokens, cu_seqlens)
    q = query.float()
    absorbed = torch.bmm(q[:, :, :Dn].transpose(0, 1), w_uk.float()).transpose(0, 1)  # [T, H, R]
    if Dq > Dn:
        absorbed = torch.cat([absorbed, q[:, :, Dn:]], -1)
    z = q.new_empty(T, H, R)
    for i, known in enumerate(cached):
        blocks = block_table[i, : known // size + 1]
        latents = cache.index_select(0, blocks).view(-1, width)[: known + 1].float()
        scores = torch.mm(absorbed[i], latents.t()).mul_(Dq**-0.5)
        torch.mm(torch.softmax(scores, -1), latents[:, :R], out=z[i])
    out = torch.bmm(z.transpose(0, 1), w_uv.float().transpose(1, 2)).transpose(0, 1)
    return out.to(query.dtype)


def pool_keys_write_host(
    index_key: Tensor,
    gate: Tensor,
    ape: Tensor,
    tail_key: Tensor,
    tail_gate: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> None:
    """Put a token of each of a few sequences into its tail, or close its pool.

    `pool_keys_write` does more.
    """
    T, slots, P = index_key.shape[0], state_slots.tolist(), ape.shape[0]
    if T > _FEW_ROWS or len(slots) != T or cu_seqlens.tolist() != list(range(T + 1)):
        pools = (tail_key, tail_gate, pool_cache)
        pool_keys_write(
            index_key, gate, ape, *pools, block_table, state_slots, computed_tokens, cu_seqlens
        )
        return
    for i, (slot, position) in enumerate(zip(slots, computed_tokens.tolist(), strict=True)):
        if slot < 0:
            continue
        place = position % P
        if place < P - 1:
            tail_key[slot, place].copy_(index_key[i])
            tail_gate[slot, place].copy_(gate[i])
            continue
        keys = torch.cat((tail_key[slot], index_key[i : i + 1])).float()
        scores = torch.cat((tail_gate[slot], gate[i : i + 1])).float().add_(ape)
        weights = torch.softmax(scores, 0)
        pool, per_block = position // P, pool_cache.shape[1]
        block = block_table[i].tolist()[pool // per_block]
        pool_cache[block, pool % per_block].copy_(weights.mul_(keys).sum(0))


KERNELS = (
    Kernel(op="latent_write", name="torch-host", run=latent_write_host, supports=on_host, rank=1),
    Kernel(op="dense_mla", name="torch-host", run=dense_mla_host, supports=on_host, rank=1),
    Kernel(
        op="pool_keys_write", name="torch-host", run=pool_keys_write_host, supports=on_host, rank=1
    ),
)
