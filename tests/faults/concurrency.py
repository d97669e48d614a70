"""Concurrency faults: rows, blocks and buffers of others reach a request's result.

Owns class C of the planted faults. Knows the block pool and the expert kernels, no probe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oxplow.cache.blocks import BlockId, BlockPool
from oxplow.engine.chunks import ChunkRules
from oxplow.engine.request import Choice
from tests.faults.record import Fault, FaultClass, expected
from tests.faults.swap import Run, attribute, kernels_of


def _freed_under_a_writer(original: Run) -> Run:
    """Free the blocks that an ended request shares with a prefill in flight."""

    def release(self: BlockPool, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if self._references[block] > 1:
                key = self._key_of.get(block)
                if key is not None:
                    self._drop_key(block)
                self._references[block] = 1
        original(self, [b for b in blocks if self._references[b] > 0])

    return release


def _padding_computed(run: Run) -> Run:
    """Send rows without an expert to expert 0, as if they were tokens."""

    def experts(
        x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest: Tensor, **named: object
    ) -> Tensor:
        return run(x, expert_ids.clamp_min(0), expert_weights, *rest, **named)

    return experts


def _one_scale_for_all(run: Run) -> Run:
    """Scale by a power of two near the batch's largest value, padding rows included."""

    def experts(
        x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest: Tensor, **named: object
    ) -> Tensor:
        if x.numel():
            scale = torch.exp2(x.abs().amax().float().log2().floor()).clamp_min(2.0**-100)
            x = x / scale.to(x.dtype) * scale.to(x.dtype)
        return run(x, expert_ids, expert_weights, *rest, **named)

    return experts


def _cut_to_nothing(original: Run) -> Run:
    """End every piece at a whole block, also one that then holds no token."""

    def stop(self: ChunkRules, choice: Choice, stop: int) -> int:
        end = original(self, choice, stop)
        return end // self._block_size * self._block_size

    return stop


FAULTS = (
    Fault(
        id="F18",
        title="an ended request frees blocks under a prefill that shares them",
        kind=FaultClass.CONCURRENCY,
        reports=("sgl-project/sglang#24527", "sgl-project/sglang#27372"),
        expected=expected("cache.blocks", "release", "block references"),
        symptom="accuracy",
        excitation="requests with a common prefix whose lives overlap, and a pool that is short",
        plant=lambda: attribute(BlockPool, "release", make=_freed_under_a_writer),
    ),
    Fault(
        id="F34",
        title="a prefill piece is rounded down to no token, for ever",
        kind=FaultClass.CONCURRENCY,
        reports=("vllm-project/vllm#47738", "vllm-project/vllm#52520"),
        expected=expected("engine.scheduler", "stop schedule", "chunk progress"),
        symptom="hang",
        excitation="what is left of a prompt is less than a block",
        plant=lambda: attribute(ChunkRules, "stop", make=_cut_to_nothing),
    ),
    Fault(
        id="F23",
        title="padded rows are routed to an expert",
        kind=FaultClass.CONCURRENCY,
        reports=("sgl-project/sglang#31838", "vllm-project/vllm#41841"),
        expected=expected("ops", "experts experts_fp8", "expert_ids expert_weights y out"),
        symptom="nan",
        excitation="rows without an expert in the batch",
        plant=lambda: kernels_of("experts", "experts_fp8", make=_padding_computed),
    ),
    Fault(
        id="F24",
        title="unwritten rows reach the batch-wide scale",
        kind=FaultClass.CONCURRENCY,
        reports=("vllm-project/vllm#37442", "Dao-AILab/flash-attention#1745"),
        expected=expected("ops", "experts experts_fp8", "x y out"),
        symptom="nan",
        excitation="rows without an expert that hold what nobody wrote",
        plant=lambda: kernels_of("experts", "experts_fp8", make=_one_scale_for_all),
    ),
)
