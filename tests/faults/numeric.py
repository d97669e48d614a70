"""Numeric faults: the result is near the right one, or right for most inputs.

Owns class N of the planted faults. Knows the kernels' signatures, no probe. Invariant: outside its
excitation a fault returns the bits of the kernel that it replaces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import log

import torch
from torch import Tensor

from oxplow.ops import affine
from oxplow.serve import rungs
from tests.faults.record import Fault, FaultClass, expected
from tests.faults.swap import Run, attribute, kernels_of

_NARROW = 1 << 32
_FEW_ROWS = 16
_WRITTEN, _READ = 64, 32


def _merged_in_two_bases(run: Run) -> Run:
    """Merge cached and new keys by log-sum-exps: taken to base 2, merged as natural ones."""

    def dense_mla(
        query: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        cache: Tensor,
        block_table: Tensor,
        computed_tokens: Tensor,
        cu_seqlens: Tensor,
    ) -> Tensor:
        out = run(query, w_uk, w_uv, cache, block_table, computed_tokens, cu_seqlens)
        starts, (_, Dn, R), size = cu_seqlens.tolist(), w_uk.shape, cache.shape[1]
        for n, known in enumerate(computed_tokens.tolist()):
            a, b = starts[n], starts[n + 1]
            if known == 0 or a == b:
                continue
            total = known + b - a
            blocks = block_table[n, : -(-total // size)].long()
            latents = cache.index_select(0, blocks).flatten(0, 1)[:total].float()
            q = query[a:b].float()
            absorbed = torch.einsum("thd,hdr->thr", q[..., :Dn], w_uk.float())
            absorbed = torch.cat([absorbed, q[..., Dn:]], -1) * query.shape[2] ** -0.5
            scores = torch.einsum("thr,jr->thj", absorbed, latents)
            at = torch.arange(total)
            ahead = at[None, :] > (known + torch.arange(b - a))[:, None]
            scores = scores.masked_fill(ahead[:, None], -torch.inf)
            parts, sums = [], []
            for where in (slice(0, known), slice(known, total)):
                parts.append(torch.softmax(scores[..., where], -1) @ latents[where, :R])
                sums.append(scores[..., where].logsumexp(-1) / log(2))
            share = torch.softmax(torch.stack(sums), 0)  # exp where exp2 is meant
            z = (share[..., None] * torch.stack(parts)).sum(0)
            out[a:b] = torch.einsum("thr,hvr->thv", z, w_uv.float()).to(out.dtype)
        return out

    return dense_mla


def _bias_in_half(run: Run) -> Run:
    def router(
        x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
    ) -> tuple[Tensor, Tensor]:
        kept = bias.bfloat16().float()
        return run(x, weight, kept, top_k=top_k, scaling=scaling, renormalise=renormalise)

    return router


def _half_for_few_rows(run: Run) -> Run:
    def router(
        x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
    ) -> tuple[Tensor, Tensor]:
        if 0 < x.shape[0] <= _FEW_ROWS:
            x, weight = x.bfloat16().float(), weight.bfloat16().float()
        return run(x, weight, bias, top_k=top_k, scaling=scaling, renormalise=renormalise)

    return router


def _neighbours_paired(run: Run) -> Run:
    """Turn channels (2i, 2i + 1) against each other where (i, i + half) is meant."""

    def side_by_side(x: Tensor) -> Tensor:
        return torch.cat([x[..., 0::2], x[..., 1::2]], -1)

    def vision_attention(q: Tensor, k: Tensor, *rest: Tensor, **named: object) -> Tensor:
        return run(side_by_side(q), side_by_side(k), *rest, **named)

    return vision_attention


def _narrow_offsets(run: Run) -> Run:
    """Compute the element offset of a slot in 32 bits: it wraps in a pool of 2**31 elements."""

    def latent_write(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
        width = cache.shape[2]
        offset = (slot_mapping.long() * width + _NARROW // 2) % _NARROW - _NARROW // 2
        run(latent, offset.div(width, rounding_mode="floor"), cache)

    return latent_write


def _states_of_other_chunks(run: Run) -> Run:
    """Write a state every 32 rows, read it as if there were one every 64."""

    def kda_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        state_slots: Tensor,
        has_state: Tensor,
        cu_seqlens: Tensor,
        *,
        lower_bound: float | None,
    ) -> Tensor:
        starts = cu_seqlens.tolist()
        go = partial(run, lower_bound=lower_bound)
        if max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0) <= _WRITTEN:
            return go(q, k, v, g, beta, state, state_slots, has_state, cu_seqlens)
        out = torch.empty_like(v)
        for n, slot in enumerate(state_slots.tolist()):
            begin, kept = starts[n], None
            for a in range(begin, max(starts[n + 1], begin + 1), _READ):
                b = min(a + _READ, starts[n + 1])
                rows = slice(a, b)
                if kept is not None and (a - begin) % _WRITTEN == 0:
                    state[slot] = kept
                has = has_state[n : n + 1] | (a > begin)
                cu = torch.tensor([0, b - a], dtype=cu_seqlens.dtype)
                token = (x[rows] for x in (q, k, v, g, beta))
                out[rows] = go(*token, state, state_slots[n : n + 1], has, cu)
                if slot >= 0 and (a - begin) % _WRITTEN == 0:
                    kept = state[slot].clone()
        return out

    return kda_prefill


def _reduced_product(original: Run) -> Run:
    """Let the matrix unit cut the operands of a product that says it does not."""

    def choose_product(device: torch.device) -> tuple[affine.Product, str]:
        product, reason = original(device)
        return replace(product, run=affine.TF32.run), reason

    return choose_product


@contextmanager
def _reduced_chain() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (affine, rungs):
            stack.enter_context(attribute(module, "choose_product", make=_reduced_product))
        yield


FAULTS = (
    Fault(
        id="F01",
        title="the chain of affine maps over segments multiplies in TF32",
        kind=FaultClass.NUMERIC,
        reports=("fla-org/flash-linear-attention#1180",),
        expected=expected("parallel", "kda_affine", "chain_m chain_n fold"),
        symptom="accuracy",
        excitation="many segments and memory that outlasts them",
        plant=_reduced_chain,
    ),
    Fault(
        id="F02",
        title="log-sum-exps of base 2 are merged as natural ones",
        kind=FaultClass.NUMERIC,
        reports=("sgl-project/sglang#40903", "sgl-project/sglang#35045", "vllm-project/vllm#47079"),
        expected=expected("ops", "dense_mla", "o out cache computed_tokens"),
        symptom="accuracy",
        excitation="attention over cached and new keys together: continued prefill, decode",
        plant=lambda: kernels_of("dense_mla", make=_merged_in_two_bases),
    ),
    Fault(
        id="F03",
        title="the router's selection bias is kept in bfloat16",
        kind=FaultClass.NUMERIC,
        reports=("sgl-project/sglang#37133",),
        expected=expected("ops", "router", "bias expert_ids"),
        symptom="accuracy",
        excitation="biased scores closer than 2**-9 of the bias",
        plant=lambda: kernels_of("router", make=_bias_in_half),
    ),
    Fault(
        id="F04",
        title="the router multiplies in bfloat16 below 17 tokens",
        kind=FaultClass.NUMERIC,
        reports=("sgl-project/sglang#33764",),
        expected=expected("ops", "router", "x weight expert_ids expert_weights"),
        symptom="accuracy",
        excitation="at most 16 rows in the call: decode, short prompts",
        plant=lambda: kernels_of("router", make=_half_for_few_rows),
    ),
    Fault(
        id="F06",
        title="rotary channels are paired side by side, not by halves",
        kind=FaultClass.NUMERIC,
        reports=("NeuraLegion/shainet#111", "huggingface/optimum-intel#1877"),
        expected=expected("ops", "vision_attention vision_attention_part", "o q k coords"),
        symptom="accuracy",
        excitation="pictures; grows with the patch's distance from the corner",
        plant=lambda: kernels_of(
            "vision_attention", "vision_attention_part", make=_neighbours_paired
        ),
    ),
    Fault(
        id="F08",
        title="an offset of 32 bits wraps in a large pool",
        kind=FaultClass.NUMERIC,
        reports=(
            "fla-org/flash-linear-attention#1080",
            "linkedin/Liger-Kernel#1248",
            "state-spaces/mamba#1015",
        ),
        expected=expected("ops", "latent_write", "slot_mapping cache"),
        symptom="accuracy",
        excitation="a pool of more than 2**31 elements, its last blocks in use",
        plant=lambda: kernels_of("latent_write", make=_narrow_offsets),
    ),
    Fault(
        id="F09",
        title="states are written every 32 rows and read as if every 64",
        kind=FaultClass.NUMERIC,
        reports=("fla-org/flash-linear-attention#876",),
        expected=expected("ops", "kda_prefill", "o state"),
        symptom="accuracy",
        excitation="a prefill piece of more than 64 tokens",
        plant=lambda: kernels_of("kda_prefill", make=_states_of_other_chunks),
    ),
)
