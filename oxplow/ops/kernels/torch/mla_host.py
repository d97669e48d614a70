"""Latent attention and pool keys for one token on a CPU, with few torch calls.

Owns the forms for one row; `mla` and `index` do the rest. Knows the contracts' names and shapes,
not the model. Invariant: lengths, slots and blocks are read on the host, so memory that holds no
token is never read, and nothing is written but what the contract names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.kernels.torch.index import pool_keys_write
from oxplow.ops.kernels.torch.mla import GATHER_ELEMENTS, dense_mla, latent_write
from oxplow.ops.table import Kernel


def latent_write_host(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Write one latent to its slot; `latent_write` does more."""
    if latent.shape[0] != 1 or not cache.is_contiguous():
        latent_write(latent, slot_mapping, cache)
        return
    slot = slot_mapping.tolist()[0]
    if slot >= 0:
        cache.view(-1, cache.shape[2])[slot].copy_(latent[0])


def dense_mla_host(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Attend one query to all tokens up to its own in one tile; `dense_mla` does more.

    Memory: float32 copies of what is narrower, and the latents of the sequence side by side where
    its blocks do not follow one another (at most GATHER_ELEMENTS floats).
    """
    (T, H, Dq), (size, width) = query.shape, cache.shape[1:]
    args = (query, w_uk, w_uv, cache, block_table, computed_tokens, cu_seqlens)
    if T != 1 or computed_tokens.shape[0] != 1:
        return dense_mla(*args)
    length = computed_tokens.tolist()[0] + 1
    if length * width > GATHER_ELEMENTS or not cache.is_contiguous():
        return dense_mla(*args)
    blocks = block_table[0, : -(-length // size)]
    latents = cache.index_select(0, blocks).view(-1, width)[:length].float()
    (_, Dn, R), q = w_uk.shape, query.view(H, 1, Dq).float()
    absorbed = torch.bmm(q[..., :Dn], w_uk.float()).view(H, R)
    if Dq > Dn:
        absorbed = torch.cat([absorbed, q[:, 0, Dn:]], -1)
    scores = torch.mm(absorbed, latents.t()).mul_(Dq**-0.5)
    weights = torch.softmax(scores, -1)
    z = torch.mm(weights, latents[:, :R])
    out = torch.bmm(z.unsqueeze(1), w_uv.float().transpose(1, 2))
    return out.view(1, H, -1).to(query.dtype)


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
    """Put one token into its pool's tail, or close the pool; `pool_keys_write` does more."""
    pools = (tail_key, tail_gate, pool_cache)
    if index_key.shape[0] != 1 or state_slots.shape[0] != 1:
        pool_keys_write(
            index_key, gate, ape, *pools, block_table, state_slots, computed_tokens, cu_seqlens
        )
        return
    slot, position, P = state_slots.tolist()[0], computed_tokens.tolist()[0], ape.shape[0]
    if slot < 0:
        return
    place = position % P
    if place < P - 1:
        tail_key[slot, place].copy_(index_key[0])
        tail_gate[slot, place].copy_(gate[0])
        return
    keys = torch.cat((tail_key[slot], index_key)).float()
    scores = torch.cat((tail_gate[slot], gate)).float().add_(ape)
    weights = torch.softmax(scores, 0)
    pool, per_block = position // P, pool_cache.shape[1]
    block = block_table[0, pool // per_block].tolist()
    pool_cache[block, pool % per_block].copy_(weights.mul_(keys).sum(0))


KERNELS = (
    Kernel(op="latent_write", name="torch-host", run=latent_write_host, supports=on_host, rank=1),
    Kernel(op="dense_mla", name="torch-host", run=dense_mla_host, supports=on_host, rank=1),
    Kernel(
        op="pool_keys_write", name="torch-host", run=pool_keys_write_host, supports=on_host, rank=1
    ),
)
