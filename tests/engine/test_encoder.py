"""Pictures are encoded in pieces between steps: fair, cancelled at once, bits as in one go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oxplow.cache.prefix import PictureSpan
from oxplow.engine.encoder import EncoderCache
from oxplow.engine.events import TokenOut
from oxplow.engine.options import SchedulerOptions
from oxplow.engine.request import Picture, Request, RequestStatus, SamplingParams
from oxplow.errors import CapacityError, ContractError
from oxplow.model.network import HybridModel
from tests.engine.build import GREEDY, Make, alone, answer, assert_all_free, drain, end_of, text
from tests.engine.test_faults import pictured, pixels, with_pictures

HIDDEN = 4


class Clock:
    """Time that passes only where work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowPicture:
    """Work of `pieces` pieces of one second each; `log` gets the name at every piece."""

    def __init__(self, name: str, pieces: int, tokens: int, clock: Clock, log: list[str]) -> None:
        self._name, self._left, self._tokens = name, pieces, tokens
        self._clock, self._log = clock, log
        self.rows: Tensor | None = None

    def advance(self) -> None:
        self._clock.now += 1.0
        self._log.append(self._name)
        self._left -= 1
        if self._left < 0:
            raise ContractError("broken in the middle", got=self._name)
        if self._left == 0:
            self.rows = torch.zeros(self._tokens, HIDDEN)


class Desk:
    """An encoder cache over slow pictures: the first pixel says how many pieces one needs."""

    def __init__(self, max_tokens: int = 100) -> None:
        self.clock, self.log = Clock(), []
        self.names: dict[int, str] = {}
        self.cache = EncoderCache(
            self._begin, hidden=HIDDEN, max_tokens=max_tokens, clock=self.clock
        )

    def _begin(self, values: Tensor, grid: Tensor) -> SlowPicture:
        pieces, tokens, number = (int(v) for v in values)
        return SlowPicture(self.names[number], pieces, tokens, self.clock, self.log)

    def picture(self, name: str, pieces: int, tokens: int = 5) -> Picture:
        number = len(self.names)
        self.names[number] = name
        values = torch.tensor([pieces, tokens, number])
        grid = torch.tensor([[1, 2, 2]])
        return Picture(span=PictureSpan(0, tokens, name), pixel_values=values, grid_thw=grid)

    def run(self, wanted: Iterable[Picture], seconds: float | None, calls: int = 1) -> str:
        self.log.clear()
        for _ in range(calls):
            self.cache.encode_some(wanted, seconds)
        return "".join(self.log)


def test_a_call_ends_after_its_time_and_does_one_piece_at_least() -> None:
    desk = Desk()
    a = desk.picture("a", 9)
    assert desk.run([a], 3.0) == "aaa"
    assert desk.run([a], 0.0) == "a"
    assert desk.cache.encode_some([a], 2.0) == 2.0
    assert desk.run([a], 100.0) == "aaa"
    assert desk.cache.is_resident(a)
    assert desk.cache.encode_some([a], 1.0) == 0.0
    assert desk.cache.num_pieces == 9


def test_large_pictures_take_turns_and_a_small_one_overtakes() -> None:
    desk = Desk()
    a, b, small = desk.picture("a", 50), desk.picture("b", 50), desk.picture("s", 2)
    assert desk.run([a, b], 1.0, calls=10) == "ab" * 5
    assert desk.run([a, b, small], 1.0, calls=4).count("s") == 2
    assert desk.cache.is_resident(small)
    assert not desk.cache.is_resident(a)


def test_work_on_an_unwanted_picture_ends_before_the_next_piece() -> None:
    desk = Desk()
    a, b = desk.picture("a", 50), desk.picture("b", 3)
    desk.run([a, b], 4.0)
    assert desk.run([b], 10.0) == "b"
    assert desk.cache.num_open == 0
    assert desk.run([], 10.0) == ""
    assert desk.run([a], 100.0) == "a" * 50, "what was dropped begins anew"


def test_one_picture_wanted_twice_is_encoded_once() -> None:
    desk = Desk()
    a = desk.picture("a", 4)
    again = Picture(span=PictureSpan(7, 5, "a"), pixel_values=a.pixel_values, grid_thw=a.grid_thw)
    assert desk.run([a, again], 100.0) == "aaaa"
    assert desk.cache.is_resident(again)


def test_a_picture_that_breaks_in_the_middle_fails_alone() -> None:
    desk = Desk()
    bad, good = desk.picture("x", 0), desk.picture("g", 2)
    desk.run([bad, good], 100.0)
    assert set(desk.cache.failures) == {"x"}
    assert desk.cache.is_resident(good)
    assert desk.cache.num_open == 0


def test_pictures_that_do_not_fit_together_wait_their_turn() -> None:
    desk = Desk(max_tokens=8)
    a, b = desk.picture("a", 2), desk.picture("b", 2)
    assert desk.run([a, b], 100.0) == "aa"
    assert desk.run([b], 100.0) == "bb"
    assert desk.cache.num_tokens == 5


@pytest.mark.parametrize("flops", [1.0, 3e5, 2e7])
def test_pieces_of_any_size_give_the_bits_of_one_go(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch, flops: float
) -> None:
    """The smallest pieces cut heads and queries apart; several segments stay apart."""
    assert model.vision is not None
    first, second = pixels(1, 16, 18), pixels(2, 4, 6)
    values = torch.cat([first[0], second[0]])
    grid = torch.cat([first[1], second[1]])
    want = model.encode(values, grid)
    monkeypatch.setattr(model.vision, "piece_flops", flops)
    encoding = model.begin_encoding(values, grid)
    pieces = 0
    while encoding.rows is None:
        encoding.advance()
        pieces += 1
    assert pieces > (40 if flops < 1e6 else 1)
    # Other tiles may round otherwise: 64 roundings of the largest value, two layers deep.
    allowed = 64 * torch.finfo(torch.float32).eps * float(want.abs().max())
    assert float((encoding.rows - want).abs().max()) <= allowed
    assert torch.equal(model.encode(values, grid), encoding.rows), "pauses change no bit"


LARGE: list[int | tuple[int, int]] = [10, (1, 40), 5]
PACED = SchedulerOptions(step_target_s=1e-6, max_prefill_tokens=64, short_tokens=16)


def test_neighbours_get_their_tokens_between_the_pieces(
    make: Make, model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.vision is not None
    want = with_pictures(model, LARGE)
    monkeypatch.setattr(model.vision, "piece_flops", 1e5)
    core = make(scheduler=PACED)
    core.add(Request(request_id="b", prompt_ids=text(1, 20), params=GREEDY))
    events = []
    while not answer(events, "b"):
        events += core.step()
    core.add(Request(request_id="a", params=GREEDY, **pictured(model, LARGE)))
    between = 0
    while not answer(events, "a"):
        told = core.step()
        between += sum(isinstance(e, TokenOut) for e in told) if core.encoder.num_open else 0
        events += told
    assert between >= 10, "the neighbour decodes while the picture is being encoded"
    events += drain(core)
    assert answer(events, "a") == want
    assert answer(events, "b") == alone(model, text(1, 20), 12)


def test_an_abort_ends_the_encoding_within_one_piece(
    make: Make, model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.vision is not None
    monkeypatch.setattr(model.vision, "piece_flops", 1e5)
    core = make(scheduler=PACED)
    core.add(Request(request_id="a", params=GREEDY, **pictured(model, LARGE)))
    core.add(Request(request_id="b", prompt_ids=text(1, 30), params=GREEDY))
    while core.encoder.num_pieces < 3:
        core.step()
    core.abort("a")
    done = core.encoder.num_pieces
    drain(core)
    assert core.encoder.num_pieces == done
    assert core.encoder.num_open == core.encoder.num_encoded == 0
    assert_all_free(core)


def test_a_burst_of_pictures_loses_nobody(make: Make, model: HybridModel) -> None:
    """P28: 24 picture requests at once, one of them broken; each ends or is refused."""
    core = make(budget=64, encoder_tokens=8, max_waiting=16)
    short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    accepted, refused = [], 0
    for number in range(24):
        built = pictured(model, [2, (number % 7, 2), 2])
        if number == 11:  # pixels that the tower refuses
            (whole,) = built["pictures"]
            grid = torch.tensor([[1, 2, 2]])
            bad = Picture(span=whole.span, pixel_values=whole.pixel_values, grid_thw=grid)
            built["pictures"] = (replace(bad, span=PictureSpan(2, 2, "broken")),)
        try:
            core.add(Request(request_id=f"{number}", params=short, **built))
            accepted.append(f"{number}")
        except CapacityError:
            refused += 1
    events = drain(core, check=False)
    ends = {name: end_of(events, name).status for name in accepted}
    assert len(ends) + refused == 24 and refused == 8
    assert ends.pop("11") is RequestStatus.FAILED
    assert set(ends.values()) == {RequestStatus.FINISHED}
    assert core.encoder.num_open == 0
    assert_all_free(core)
