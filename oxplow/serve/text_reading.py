"""A model read and written token by token, outside the engine: losses and guesses ahead.

Owns teacher forcing over given text and greedy decoding with the draft block at its side. Knows no
chat and no scheduler; it drives the model's own step records.
Invariant: the loss of a token is that of the whole window before it, whatever the chunks; a guess
counts as accepted only if it equals what the model itself says at that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oxplow.cache.plan import blocks_for
from oxplow.errors import ConfigError
from oxplow.feedback.exam import DraftRun, TextWindow, item_name
from oxplow.model.caches import CacheTensors
from oxplow.model.network import HybridModel
from oxplow.model.step import SequenceRows, build_step
from oxplow.ops.table import OpTable
from oxplow.serve.text import Vocabulary

__all__ = ["TextReader"]

_CHUNK = 512  # tokens of one forward pass
_LOGIT_ROWS = 256  # rows of the vocabulary at once
_CHARACTERS = 6  # per token, at first; more where that was too few
_RUNS = 16  # continuations decoded together


class TextReader:
    """Reads held-out text with a model, and continues it."""

    def __init__(self, model: HybridModel, ops: OpTable, vocabulary: Vocabulary) -> None:
        self._model, self._device = model, ops.facts.device
        self._vocabulary = vocabulary

    @property
    def drafts(self) -> bool:
        """Tell whether the model has a draft block."""
        return self._model.draft_block is not None

    def read(self, kind: str, text: str, count: int, num_tokens: int) -> Iterator[TextWindow]:
        """Read `count` windows of `num_tokens` tokens, evenly spread over the text.

        The first token of a window is given, not scored. Raises ConfigError for too short a text.
        """
        caches = self._caches(1, num_tokens)
        for index, ids in enumerate(self._stretches(text, count, num_tokens + 1)):
            nats, drafted, accepted = self._force(ids, caches)
            yield TextWindow(
                part=kind,
                item=item_name(index, ids, kind),
                nats=nats,
                num_bytes=sum(len(self._vocabulary.token_bytes(i)) for i in ids[1:]),
                num_tokens=len(ids) - 1,
                drafted=drafted,
                accepted=accepted,
            )

    def write(
        self, kind: str, text: str, count: int, prompt_tokens: int, new_tokens: int
    ) -> Iterator[DraftRun]:
        """Continue `count` stretches greedily; each step the draft block guesses one token ahead.

        Raises ConfigError for a model without a draft block, or too short a text.
        """
        prompts = list(self._stretches(text, count, prompt_tokens))
        for start in range(0, count, _RUNS):
            part = prompts[start : start + _RUNS]
            said, guessed = self._decode(part, new_tokens)
            for number, prompt in enumerate(part):
                came = said[number][1:]  # the first token was said before any guess
                pairs = zip(guessed[number], came, strict=False)
                yield DraftRun(
                    part=kind,
                    item=item_name(start + number, prompt, kind),
                    drafted=len(came),
                    accepted=sum(guess == token for guess, token in pairs),
                    distinct=len(set(said[number])),
                )

    def _caches(self, count: int, num_tokens: int) -> CacheTensors:
        model = self._model
        return CacheTensors(
            model.components(),
            num_blocks=count * blocks_for(num_tokens, model.block_size),
            num_slots=count,
            device=self._device,
        )

    def _stretches(self, text: str, count: int, num_tokens: int) -> Iterator[list[int]]:
        """Cut token stretches whose starts are evenly spread; only what is read is tokenised."""
        for index in range(count):
            room, ids = num_tokens * _CHARACTERS, list[int]()
            while len(ids) < num_tokens and room <= 2 * len(text):
                start = max(0, len(text) - room) * index // max(1, count - 1)
                ids = self._vocabulary.encode_plain(text[start : start + room])
                room *= 2
            if len(ids) < num_tokens:
                wanted = f"{num_tokens} tokens"
                raise ConfigError("the text is too short", got=f"{len(ids)} tokens", wanted=wanted)
            yield ids[:num_tokens]

    @torch.inference_mode()
    def _force(self, ids: Sequence[int], caches: CacheTensors) -> tuple[float, int, int]:
        """Return the summed loss of ids[1:], and how many guesses were made and accepted."""
        given = torch.tensor(ids, dtype=torch.int64, device=self._device)
        nats = torch.zeros((), dtype=torch.float64, device=self._device)
        best, guesses = [], []
        last = len(ids) - 1
        for start in range(0, last, _CHUNK):
            stop = min(last, start + _CHUNK)
            step = build_step(
                [self._rows(0, ids[start:stop], start, last)],
                block_size=self._model.block_size,
                device=self._device,
            )
            hidden = self._model.forward(step, caches).hidden
            following = given[start + 1 : stop + 1]
            for at in range(0, stop - start, _LOGIT_ROWS):
                logits = self._model.project(hidden[at : at + _LOGIT_ROWS])
                target = following[at : at + _LOGIT_ROWS, None]
                nats -= logits.log_softmax(-1).gather(1, target).double().sum()
                best.append(logits.argmax(-1))
            if self.drafts:
                drafted = self._model.draft(hidden, following, step, caches).hidden
                guesses += [
                    self._model.project(part).argmax(-1) for part in drafted.split(_LOGIT_ROWS)
                ]
        if not guesses:
            return float(nats), 0, 0
        # Row t of the trunk says token t+1, row t of the draft block token t+2.
        agree = torch.cat(guesses)[:-1] == torch.cat(best)[1:]
        return float(nats), agree.numel(), int(agree.sum())

    @torch.inference_mode()
    def _decode(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens said and guessed: guess i is for the token said at i + 1."""
        length = len(prompts[0]) + new_tokens
        caches = self._caches(len(prompts), length)
        said: list[list[int]] = [[] for _ in prompts]
        guessed: list[list[int]] = [[] for _ in prompts]
        waiting: list[Sequence[int]] = list(prompts)
        computed = 0
        for _ in range(new_tokens):
            rows = [self._rows(n, ids, computed, length) for n, ids in enumerate(waiting)]
            step = build_step(rows, block_size=self._model.block_size, device=self._device)
            out = self._model.forward(step, caches)
            tokens = out.logits.argmax(-1)
            following = self._following(waiting, tokens)
            guess = self._model.draft(out.hidden, following, step, caches).logits.argmax(-1)
            computed += len(waiting[0])
            for n, (token, ahead) in enumerate(zip(tokens.tolist(), guess.tolist(), strict=True)):
                said[n].append(token)
                guessed[n].append(ahead)
            waiting = [[token] for token in tokens.tolist()]
        return said, guessed

    def _following(self, waiting: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """Return for each row the token after it: the prompt's own, then the one just said."""
        parts = [
            torch.tensor([*ids[1:], int(token)], dtype=torch.int64, device=self._device)
            for ids, token in zip(waiting, tokens.tolist(), strict=True)
        ]
        return torch.cat(parts)

    def _rows(self, slot: int, ids: Sequence[int], computed: int, longest: int) -> SequenceRows:
        width = blocks_for(longest, self._model.block_size)
        return SequenceRows(
            token_ids=ids,
            computed_tokens=computed,
            slot=slot,
            block_ids=range(slot * width, (slot + 1) * width),
        )
