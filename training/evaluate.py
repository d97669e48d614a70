"""Quick evaluation of a training state on the examination's held-out items.

Owns the training-side figures: teacher-forced exactness (all answer tokens are the argmax, which is
what greedy decoding would give), bits a byte, MTP acceptance by teacher forcing and on self-
generated text. The product's own figures come from `oxplow eval`. Invariant: the weights are
rounded to their stored form first.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oxplow.feedback.exam import (
    build_haystacks,
    build_json_items,
    build_pictures,
    build_tool_items,
    read_held_out,
)
from training.canvas import patches_of
from training.chat import ANSWER, CORPUS, Call, Conversation, Turn, segments_of, write_call
from training.generators.mix import Batch, empty_batch, fill_row, place_pictures
from training.layers import Pass
from training.model import Nano
from training.step import cross_entropy
from training.vision import MAX_PATCHES, Pictures, patch_places

TOKENS_A_PASS = 32_768
Encode = Callable[[str], list[int]]
Row = list[tuple[list[int], float]]


@dataclass(slots=True)
class Tally:
    """Counts of one group of rows."""

    exact: list[bool] = field(default_factory=list)
    loss: float = 0.0
    predicted: int = 0
    accepted: int = 0
    drafted: int = 0

    def summary(self) -> dict[str, float]:
        """Return shares and means; absent parts are left out."""
        out: dict[str, float] = {}
        if self.exact:
            out |= {"exact": round(sum(self.exact) / len(self.exact), 4), "n": len(self.exact)}
        if self.predicted:
            out["loss"] = round(self.loss / self.predicted, 4)
        if self.drafted:
            out["mtp"] = round(self.accepted / self.drafted, 4)
        return out


class Judge:
    """Runs rows through the model with constant shapes and tallies them."""

    def __init__(
        self,
        model: Nano,
        encode: Encode,
        special: Callable[[str], int],
        tokens: int = TOKENS_A_PASS,
    ) -> None:
        self.model, self.encode, self.special, self.tokens = model, encode, special, tokens
        self.device = model.embedding.device
        self.loss = model.backend.compiled(cross_entropy)

    def encode_all(self, conversation: Conversation) -> Row:
        """Tokenise a conversation."""
        return [
            (self.encode(s) if isinstance(s, str) else list(s), w)
            for s, w in segments_of(conversation)
        ]

    def predict(
        self, batch: Batch, sparse: bool, pictures: Pictures | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return argmax of trunk and MTP, and the loss, each [B, T]."""
        rows, length = batch.ids.shape[0], batch.ids.shape[1] - 2
        ids = torch.from_numpy(batch.ids).long().to(self.device)
        places = torch.from_numpy(batch.places).to(self.device)
        # Gradients stay enabled: the compiled graphs of training are reused, nothing is propagated
        # back.
        state, draft = self.model(
            ids[:, :-1], Pass(rows, length, sparse), pictures, places if pictures else None
        )
        logits = self.model.logits(state).detach()
        loss = self.loss(logits, ids[:, 1:-1].reshape(-1)).detach().view(rows, length)
        best = logits.argmax(-1).view(rows, length)
        return best, self.model.logits(draft).detach().argmax(-1).view(rows, length), loss

    def run(
        self,
        rows: list[Row],
        length: int,
        sparse: bool,
        shown: list[tuple[np.ndarray, int, int]] | None = None,
    ) -> Tally:
        """Tally rows of at most `length` + 2 tokens; `shown`: one (patches, rows, cols) a row."""
        tally, size = Tally(), max(1, self.tokens // length)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            batch = empty_batch(size, length, size if shown else 0)
            for index, row in enumerate(part):
                fill_row(batch, index, row)
            pictures = self.stack(shown[start : start + size], size) if shown else None
            if shown:
                counts = [r * c for _, r, c in shown[start : start + size]]
                place_pictures(batch, counts, self.special("<|image|>"))
            best, draft, loss = self.predict(batch, sparse, pictures)
            self.count(
                tally,
                batch,
                len(part),
                (best.cpu().numpy(), draft.cpu().numpy(), loss.cpu().numpy()),
            )
        return tally

    def count(
        self, tally: Tally, batch: Batch, used: int, seen: tuple[np.ndarray, np.ndarray, np.ndarray]
    ) -> None:
        """Add the first `used` rows: exactness of each row's answer, corpus loss, MTP agreement
        with the trunk.
        """
        best, draft, loss = seen
        target, weight = batch.ids[:, 1:-1], batch.weights[:, 1:-1]
        for index in range(used):
            answer = weight[index] == ANSWER
            if answer.any():
                tally.exact.append(bool((best[index] == target[index])[answer].all()))
        corpus = weight[:used] == CORPUS
        tally.loss += float(loss[:used][corpus].sum())
        tally.predicted += int(corpus.sum())
        live = batch.weights[:used, 2:-1] > 0
        agree = draft[:used, :-1] == best[:used, 1:]
        tally.accepted += int((agree & live).sum())
        tally.drafted += int(live.sum())

    def stack(self, shown: list[tuple[np.ndarray, int, int]], slots: int) -> Pictures:
        """Pad pictures into `slots` slots on the device."""
        patches = np.zeros((slots, MAX_PATCHES, 588), np.float32)
        grid = np.full((slots, 2), 4, np.int64)
        for index, (pixels, rows, cols) in enumerate(shown):
            patches[index, : len(pixels)], grid[index] = pixels, (rows, cols)
        rows, cols, valid = patch_places(torch.from_numpy(grid).to(self.device))
        return Pictures(torch.from_numpy(patches).to(self.device), rows, cols, valid)

    def needle(self, length: int, count: int, sparse: bool, seed: int = 0) -> Tally:
        """Recall: every needle of `count` haystacks asked on its own."""
        stacks = build_haystacks(length, count, lambda text: len(self.encode(text)), seed)
        rows = []
        for stack in stacks:
            for needle in stack.needles:
                content = stack.messages(needle)[0]["content"]
                rows.append(self.encode_all(Conversation((Turn(content, needle.answer),))))
        return self.run(rows, length, sparse)

    def tools(self, count: int, sparse: bool) -> Tally:
        """Tool calls, exact to the token."""
        rows = []
        for item in build_tool_items(count):
            head = segments_of(
                Conversation((Turn(item.messages[0]["content"], ""),), tuple(item.tools))
            )[:-1]
            call = (write_call(Call(item.name, item.arguments)) + "<|observation|>", ANSWER)
            rows.append([(self.encode(s), w) for s, w in [*head, call]])
        return self.run(rows, 1024, sparse)

    def json(self, count: int, sparse: bool) -> Tally:
        """JSON answers, exact to the token in schema order (stricter than equal values)."""
        items = build_json_items(count)
        turns = [Turn(i.messages[0]["content"], json.dumps(i.expected)) for i in items]
        return self.run([self.encode_all(Conversation((turn,))) for turn in turns], 512, sparse)

    def pictures(self, count: int, shift: int = 0) -> dict[str, dict[str, float]]:
        """Pictures by kind; `shift` swaps the pictures between questions (accuracy must fall to
        chance).
        """
        items, rows, shown = build_pictures(count), [], []
        for index, item in enumerate(items):
            pixels, canvas = patches_of(items[(index + shift) % count].image)
            tokens = [self.special("<|image|>")] * canvas.num_tokens
            user = ["<|begin_of_image|>", tokens, f"<|end_of_image|>{item.question}"]
            rows.append(self.encode_all(Conversation((Turn(user, item.answer),))))
            shown.append((pixels, canvas.rows, canvas.cols))
        exact = self.run(rows, 128, False, shown).exact
        kinds = {
            kind: [e for e, i in zip(exact, items, strict=True) if i.kind == kind]
            for kind in ("digit", "shape", "colour")
        }
        kinds["all"] = exact
        return {
            kind: {"exact": round(sum(e) / len(e), 4), "n": len(e)} for kind, e in kinds.items()
        }

    def held_out(self, kind: str, passes: int, sparse: bool) -> dict[str, float]:
        """Bits a byte over held-out text in rows of 2,048 tokens, and MTP acceptance by teacher
        forcing.
        """
        text, length = read_held_out()[kind], 2048
        ids = self.encode(text)
        count = min(passes * self.tokens // length, (len(ids) - 2) // length)
        rows = [[(ids[i * length : (i + 1) * length + 2], CORPUS)] for i in range(count)]
        out = self.run(rows, length, sparse).summary()
        tokens_a_byte = len(ids) / len(text.encode())
        return out | {"bits_per_byte": round(out["loss"] / math.log(2) * tokens_a_byte, 4)}

    def self_generated(self, kind: str, prompt: int = 256, generated: int = 96) -> dict[str, float]:
        """MTP acceptance on greedy text of the model's own: a draft counts if it is the token that
        follows.
        """
        ids = self.encode(read_held_out()[kind])
        length = 512
        size, rng = self.tokens // length, random.Random(5)
        batch = empty_batch(size, length, 0)
        for index in range(size):
            start = rng.randrange(len(ids) - prompt)
            batch.ids[index, :prompt] = ids[start : start + prompt]
        for at in range(prompt, prompt + generated):
            best, draft, _ = self.predict(batch, True)
            batch.ids[:, at] = best[:, at - 1].cpu().numpy()
        best, draft, _ = self.predict(batch, True)
        window = slice(prompt, prompt + generated - 2)
        agree = draft[:, window].cpu().numpy() == batch.ids[:, prompt + 2 : prompt + generated]
        distinct = np.mean(
            [len(set(row[prompt : prompt + generated].tolist())) for row in batch.ids]
        )
        return {
            "accepted": round(float(agree.mean()), 4),
            "n": agree.size,
            "distinct": round(float(distinct), 1),
        }


@torch.no_grad()
def round_to_stored(model: Nano) -> None:
    """Round the weights to what the checkpoint stores (bf16 but for the fp32 ones)."""
    for name, parameter in model.named_parameters():
        if not name.endswith((".base", ".scale", "a_log", "dt_bias")):
            halves = 2 if name == "vision.patch" else 1
            parameter.copy_((parameter / halves).bfloat16().float() * halves)


def evaluate(judge: Judge, stacks: dict[int, int], quick: bool) -> dict[str, object]:
    """Return every figure; `stacks` maps a context length to its number of haystacks, `quick`
    leaves out dense attention.
    """
    judge.model.eval()
    out: dict[str, object] = {}
    for sparse in (True,) if quick else (True, False):
        name = "sparse" if sparse else "dense"
        for length, count in stacks.items():
            out[f"needle_{length}_{name}"] = judge.needle(length, count, sparse).summary()
        for kind in ("code", "prose"):
            out[f"held_out_{kind}_{name}"] = judge.held_out(kind, 2 if quick else 4, sparse)
        out[f"tool_call_{name}"] = judge.tools(128 if quick else 256, sparse).summary()
        out[f"json_{name}"] = judge.json(128 if quick else 256, sparse).summary()
    out["picture"] = judge.pictures(192 if quick else 600)
    out["picture_swapped"] = judge.pictures(192, shift=7)
    if not quick:
        for kind in ("code", "prose"):
            out[f"mtp_self_generated_{kind}"] = judge.self_generated(kind)
    judge.model.train()
    return out
