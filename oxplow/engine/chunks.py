"""Where prefill chunks end and which states are kept.

Owns the positions of snapshots and every reason to shorten a chunk. Knows no budget, no queue and
no tensor.
Invariant: a state is kept only at the end of a whole block, and a chunk that may run at all makes
progress.
"""

from __future__ import annotations

from collections.abc import Callable

from oxplow.cache.prefix import SnapshotKind
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import Choice, Picture

_PROMPT_LOGPROB_ROWS = 256  # full-vocabulary rows that one chunk may ask for


class ChunkRules:
    """Positions in a sequence that a step must not run across, or after which a state is kept."""

    def __init__(
        self,
        block_size: int,
        options: MemoryOptions,
        *,
        keeps_states: bool,
        is_resident: Callable[[Picture], bool],
    ) -> None:
        self._block_size, self._options = block_size, options
        self._keeps_states, self._is_resident = keeps_states, is_resident

    def stop(self, choice: Choice, stop: int) -> int:
        """Shorten a chunk to where a snapshot is due, a picture is missing, or a block ends."""
        start, size = choice.computed_tokens, self._block_size
        if choice.wants_prompt_logprobs and start < choice.prompt_len:
            stop = min(stop, start + _PROMPT_LOGPROB_ROWS)
        if stop < len(choice.token_ids) and stop // size * size > start:
            stop = stop // size * size
        if self._keeps_states:
            ends = (choice.branch_position, _prompt_end(choice, size), self.next_spaced(start))
            stop = min([stop, *(e for e in ends if start < e < choice.prompt_len)])
        for picture in choice.request.pictures:
            span = picture.span
            if span.start < stop and span.end > start and not self._is_resident(picture):
                stop = max(start, span.start)
        return stop

    def next_spaced(self, position: int) -> int:
        """Return the first regular snapshot position after `position`."""
        size = self._block_size
        at = 0
        while at <= position:
            step = max(self._options.snapshot_tokens, int(at * (self._options.snapshot_ratio - 1)))
            at += -(-step // size) * size
        return at

    def due_snapshot(self, choice: Choice) -> SnapshotKind | None:
        """Say whether the state after the computed tokens is worth keeping, and as what."""
        at, size = choice.computed_tokens, self._block_size
        if not self._keeps_states or at == 0 or at % size:
            return None
        if at == choice.branch_position:
            return SnapshotKind.BRANCH
        if at == _prompt_end(choice, size):
            return SnapshotKind.PROMPT_END
        if at < choice.prompt_len:
            return SnapshotKind.SPACED if at == self.next_spaced(at - 1) else None
        every = -(-self._options.answer_snapshot_tokens // size) * size
        return SnapshotKind.ANSWER if at % every == 0 else None


def _prompt_end(choice: Choice, block_size: int) -> int:
    """The last whole block below the prompt's end; a repeat of the prompt starts there."""
    return (choice.prompt_len - 1) // block_size * block_size
