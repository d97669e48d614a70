"""Batches: rows of one length from a mix of corpus, recall and task conversations.

Owns packing into fixed shapes, so that a training step can be one CUDA graph. Invariant: every row
has length + 2 tokens (the MTP block looks one token further); picture tokens and picture slots
match in order and number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from training.chat import CORPUS, Conversation, Segment, segments_of
from training.generators.pictures import Drawn, picture_conversation
from training.generators.recall import recall_row
from training.generators.source import Source, word_pieces
from training.generators.talk import continue_conversation, talk_conversation
from training.generators.tools import json_conversation, tool_conversation
from training.render import FIELDS
from training.vision import MAX_BLOCKS

LONG_ROW = 4096


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of row kinds, and of pictures among the task tokens; `slots` is the fixed number of
    picture slots.
    """

    corpus: float
    recall: float
    tasks: float
    pictures: float
    slots: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one step: ids and weights [B, T+2], pictures [S, 20], flat places [S*36] of their
    rows among B*(T+1).
    """

    ids: np.ndarray
    weights: np.ndarray
    pictures: np.ndarray
    places: np.ndarray


def fill_row(batch: Batch, row: int, segments: list[tuple[list[int], float]]) -> None:
    """Write segments into a row, cutting what is too long."""
    size, at = batch.ids.shape[1], 0
    for ids, weight in segments:
        stop = min(size, at + len(ids))
        batch.ids[row, at:stop] = ids[: stop - at]
        batch.weights[row, at:stop] = weight
        at = stop


def empty_batch(rows: int, length: int, slots: int) -> Batch:
    """Return a batch of zeros whose spare picture rows point behind the end; spare slots are 4x4
    black pictures.
    """
    pictures = np.zeros((slots, FIELDS), np.float32)
    pictures[:, 3:5], pictures[:, 12:14], pictures[:, 14:16] = 1, 112, 4
    places = np.full(slots * MAX_BLOCKS, rows * (length + 1), np.int64)
    shape = (rows, length + 2)
    return Batch(np.zeros(shape, np.int32), np.zeros(shape, np.float32), pictures, places)


def place_pictures(batch: Batch, counts: list[int], image_token: int) -> None:
    """Point each picture's rows at its tokens, in order."""
    where = np.flatnonzero((batch.ids[:, :-1] == image_token).reshape(-1))
    if len(where) != sum(counts):
        raise ValueError(f"{len(where)} picture tokens for {sum(counts)} picture rows")
    at = 0
    for slot, count in enumerate(counts):
        batch.places[slot * MAX_BLOCKS : slot * MAX_BLOCKS + count] = where[at : at + count]
        at += count


class Mixer:
    """Makes batches from one worker's random stream."""

    def __init__(
        self,
        tokenizer_file: str,
        tokens: np.ndarray,
        words: list[str],
        atlas_names: list[str],
        seed: int,
    ) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.image_token = self.tokenizer.token_to_id("<|image|>")
        self.atlas_names = atlas_names
        pieces = word_pieces(self.tokenizer.get_vocab())
        self.source = Source(random.Random(seed), words, tokens, pieces)

    def encode(self, text: str) -> list[int]:
        """Tokenise without additions."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, segments: list[Segment]) -> list[tuple[list[int], float]]:
        """Tokenise the text segments, leave token segments."""
        texts = [s for s, _ in segments if isinstance(s, str)]
        ids = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [(next(ids).ids if isinstance(s, str) else s, w) for s, w in segments]

    def conversation(
        self, picture_share: float, may_show: bool
    ) -> tuple[Conversation, Drawn | None]:
        """Draw one task conversation."""
        rng = self.source.rng
        if may_show and rng.random() < picture_share:
            return picture_conversation(self.source, self.atlas_names, self.image_token)
        kinds = (tool_conversation, json_conversation, talk_conversation, continue_conversation)
        return rng.choices(kinds, (40, 15, 39, 6))[0](self.source), None

    def recall(self, length: int) -> list[tuple[list[int], float]]:
        """Return a recall row; half of the long ones are several short ones, so that a stage of
        long contexts does not forget short ones.
        """
        rng = self.source.rng
        parts = rng.choice((2, 4, 8)) if length > LONG_ROW and rng.random() < 0.5 else 1
        sizes = [length // parts] * (parts - 1)
        sizes.append(length - sum(sizes))
        rows = [recall_row(self.source, size, self.encode) for size in sizes]
        return [segment for row in rows for segment in self.encode_all(row)]

    def task_row(self, length: int, mix: Mix, drawn: list[Drawn]) -> list[tuple[list[int], float]]:
        """Pack conversations one after another; pictures are appended to `drawn`."""
        row: list[tuple[list[int], float]] = []
        size = 0
        while size < length + 2:
            conversation, picture = self.conversation(mix.pictures, len(drawn) < mix.slots)
            segments = self.encode_all(segments_of(conversation))
            count = sum(len(ids) for ids, _ in segments)
            nearly_full = size > 0.8 * length
            if size + count > length and nearly_full and self.source.rng.random() < 0.7:
                row.append((self.source.corpus(length + 2 - size), CORPUS))
                break
            # A picture's tokens must not be cut; a long text may be.
            if size + count > length and picture is not None:
                continue
            if picture is not None:
                drawn.append(picture)
            row += segments
            size += count
        return row

    def batch(self, rows: int, length: int, mix: Mix) -> Batch:
        """Make one batch."""
        batch, drawn = empty_batch(rows, length, mix.slots), []
        # Evenly spread draws: four long rows a step would otherwise leave whole kinds out of many
        # steps.
        offset, bounds = self.source.rng.random(), (mix.corpus, mix.corpus + mix.recall)
        for index in range(rows):
            place = (index + offset) / rows * (mix.corpus + mix.recall + mix.tasks)
            kind = "corpus" if place < bounds[0] else "recall" if place < bounds[1] else "tasks"
            if kind == "corpus":
                segments = [(self.source.corpus(length + 2), CORPUS)]
            elif kind == "recall":
                segments = self.recall(length + 2)
            else:
                segments = self.task_row(length, mix, drawn)
            fill_row(batch, index, segments)
        for slot, picture in enumerate(drawn):
            batch.pictures[slot] = picture.numbers
        place_pictures(batch, [picture.canvas.num_tokens for picture in drawn], self.image_token)
        return batch
