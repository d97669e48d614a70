"""Every sampling field changes the output as documented; log-probabilities are the model's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from torch import Tensor

from oxplow.engine.events import TokenOut
from oxplow.engine.llm import generate
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import (
    FinishReason,
    Request,
    RequestStatus,
    SamplingParams,
    TokenMask,
    choice_seed,
)
from oxplow.errors import RequestError
from oxplow.model.network import HybridModel
from tests.drive import Driver
from tests.engine.build import (
    GREEDY,
    Make,
    alone,
    answer,
    answers,
    ask,
    assert_all_free,
    choice_end,
    drain,
    end_of,
    prompt_of,
    text,
)

PROMPT = text(1, 20)


def free_run(**fields: object) -> SamplingParams:
    """Return parameters that run 12 tokens; greedy unless said otherwise."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields)


@pytest.fixture(scope="module")
def logits(model: HybridModel) -> Tensor:
    """The driver's logits at every position of PROMPT and its greedy answer."""
    tokens = alone(model, PROMPT, 12)
    return Driver(model).step({"a": [*PROMPT, *tokens[:-1]]})["a"]


@pytest.fixture(scope="module")
def greedy(model: HybridModel) -> list[int]:
    return alone(model, PROMPT, 12)


def test_logprobs_are_those_of_the_model(make: Make, logits: Tensor, greedy: list[int]) -> None:
    events = ask(make(), PROMPT, free_run(logprobs=3))
    wanted = logits[len(PROMPT) - 1 :].log_softmax(-1)
    seen = [e.logprob for e in events if isinstance(e, TokenOut)]
    for i, (row, got) in enumerate(zip(wanted, seen, strict=True)):
        assert got is not None
        assert got.token_id == greedy[i]
        assert got.logprob == pytest.approx(float(row[greedy[i]]), abs=1e-4)
        values, ids = row.topk(3)
        assert [t for t, _ in got.top] == ids.tolist()
        assert [v for _, v in got.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("budget", [7, 64])
def test_prompt_logprobs_are_those_of_the_model(make: Make, logits: Tensor, budget: int) -> None:
    core = make(budget=budget)
    ask(core, PROMPT, GREEDY)  # a cached prefix must not swallow them
    done = prompt_of(ask(core, PROMPT, free_run(prompt_logprobs=2)), "a")
    assert len(done.logprobs) == len(PROMPT)
    assert done.logprobs[0] is None
    wanted = logits.log_softmax(-1)
    for position, got in enumerate(done.logprobs[1:], 1):
        assert got is not None
        assert got.token_id == PROMPT[position]
        row = wanted[position - 1]
        assert got.logprob == pytest.approx(float(row[PROMPT[position]]), abs=1e-4)
        assert [t for t, _ in got.top] == row.topk(2).indices.tolist()


def test_echo_without_an_answer(make: Make) -> None:
    events = ask(make(), PROMPT, free_run(max_tokens=0, prompt_logprobs=0))
    assert answer(events, "a") == []
    assert len(prompt_of(events, "a").logprobs) == len(PROMPT)
    assert choice_end(events, "a").reason is FinishReason.LENGTH


def test_log_probabilities_do_not_change_the_answer(make: Make, greedy: list[int]) -> None:
    assert answer(ask(make(), PROMPT, free_run(logprobs=5, prompt_logprobs=1)), "a") == greedy


def expected_with_penalties(
    model: HybridModel, repetition: float, presence: float, frequency: float
) -> list[int]:
    """Greedy by hand: the documented formulas, one token at a time."""
    driver = Driver(model)
    row = driver.step({"a": PROMPT})["a"][-1]
    made: list[int] = []
    for _ in range(12):
        row = row.clone()
        for token in {*PROMPT, *made}:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(made):
            row[token] -= presence + frequency * made.count(token)
        made.append(int(row.argmax()))
        row = driver.step({"a": [made[-1]]})["a"][-1]
    return made


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.8, 0, 0), (1, 2, 0), (1, 0, 1.5), (1.3, -1, 0.5)]
)
def test_penalties(
    make: Make, model: HybridModel, repetition: float, presence: float, frequency: float
) -> None:
    params = free_run(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    got = answer(ask(make(), PROMPT, params), "a")
    assert got == expected_with_penalties(model, repetition, presence, frequency)


def test_penalties_survive_preemption(make: Make, model: HybridModel) -> None:
    params = free_run(max_tokens=30, frequency_penalty=1.5, repetition_penalty=1.2)
    alone_tokens = [answer(ask(make(), text(60 + i, 30), params), "a") for i in range(3)]
    core = make(blocks=6, memory=MemoryOptions(output_share=0.0, swap_min_tokens=10**9))
    for i in range(3):
        core.add(Request(request_id=f"{i}", prompt_ids=text(60 + i, 30), params=params))
    events = drain(core)
    assert core.stats().preemptions > 0
    assert [answer(events, f"{i}") for i in range(3)] == alone_tokens


def test_logit_bias_forces_and_forbids(make: Make, greedy: list[int]) -> None:
    forced = answer(ask(make(), PROMPT, free_run(logit_bias={77: 1000.0})), "a")
    assert forced == [77] * 12
    without = answer(ask(make(), PROMPT, free_run(logit_bias={greedy[0]: -1000.0})), "a")
    assert greedy[0] not in without


def test_stop_tokens_end_and_min_tokens_delays_them(make: Make, greedy: list[int]) -> None:
    stop = greedy[4]
    first = greedy.index(stop)
    events = ask(make(), PROMPT, free_run(stop_token_ids=(stop,)))
    assert answer(events, "a") == greedy[: first + 1]
    end = choice_end(events, "a")
    assert (end.reason, end.stop_token) == (FinishReason.STOP, stop)
    later = ask(make(), PROMPT, free_run(stop_token_ids=(stop,), min_tokens=8))
    assert stop not in answer(later, "a")[:8]
    assert len(answer(later, "a")) >= 8


def test_end_tokens_end_unless_ignored(make: Make, model: HybridModel) -> None:
    end = model.spec.eos_token_ids[1]
    push = {end: 1000.0}
    events = ask(make(), PROMPT, SamplingParams(temperature=0, max_tokens=5, logit_bias=push))
    assert answer(events, "a") == [end]
    assert choice_end(events, "a").reason is FinishReason.STOP
    ignored = ask(make(), PROMPT, free_run(max_tokens=5, logit_bias=push))
    assert answer(ignored, "a") == [end] * 5
    banned = SamplingParams(temperature=0, max_tokens=5, min_tokens=3, logit_bias=push)
    got = answer(ask(make(), PROMPT, banned), "a")
    assert got[3] == end
    assert not set(got[:3]) & set(model.spec.eos_token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
)
def test_cuts_to_one_token_are_greedy(
    make: Make, greedy: list[int], fields: dict[str, float]
) -> None:
    params = free_run(temperature=1.0, seed=3, **fields)
    assert answer(ask(make(), PROMPT, params), "a") == greedy


def sampled(seed: int | None = 7, **more: object) -> SamplingParams:
    return free_run(temperature=1.5, seed=seed, **more)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-38])
def test_a_temperature_next_to_nothing_is_greedy(
    make: Make, greedy: list[int], temperature: float
) -> None:
    assert answer(ask(make(), PROMPT, free_run(temperature=temperature, seed=3)), "a") == greedy


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e300])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_penalty_makes_a_token_that_is_none(
    make: Make, greedy: list[int], penalty: float, temperature: float
) -> None:
    core = make()
    params = free_run(
        repetition_penalty=penalty, temperature=temperature, seed=3, logprobs=2, frequency_penalty=2
    )
    core.add(Request(request_id="bad", prompt_ids=PROMPT, params=params))
    core.add(Request(request_id="good", prompt_ids=PROMPT, params=free_run()))
    events = drain(core)
    tokens = answer(events, "bad")
    assert len(tokens) == 12 and min(tokens) >= 0
    assert answer(events, "good") == greedy


def test_a_draw_without_a_token_fails_its_request_only(make: Make, greedy: list[int]) -> None:
    core = make()
    core.add(Request(request_id="bad", prompt_ids=PROMPT, params=free_run(seed=7, temperature=1)))
    core.add(Request(request_id="good", prompt_ids=PROMPT, params=free_run()))
    sample = core.runner.sampler._ops.sample

    def lose(*given: Tensor) -> Tensor:
        tokens = sample(*given)
        return tokens.masked_fill(given[1] > 0, -1)  # the row that is drawn, not the greedy one

    object.__setattr__(core.runner.sampler, "_ops", SimpleNamespace(sample=lose))
    events = drain(core)
    assert end_of(events, "bad").status is RequestStatus.FAILED
    assert answer(events, "good") == greedy
    assert_all_free(core)


def test_a_seed_fixes_the_answer_alone_and_in_company(make: Make) -> None:
    first = answer(ask(make(), PROMPT, sampled()), "a")
    assert first == answer(ask(make(), PROMPT, sampled()), "a")
    assert first != answer(ask(make(), PROMPT, sampled(8)), "a")
    core = make(budget=16)
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=sampled()))
    for i in range(3):
        core.add(Request(request_id=f"{i}", prompt_ids=text(i, 30), params=sampled(i)))
    assert answer(drain(core), "a") == first


def test_without_a_seed_answers_differ(make: Make) -> None:
    core = make()
    first = answer(ask(core, PROMPT, sampled(None)), "a")
    assert first != answer(ask(core, PROMPT, sampled(None)), "a")


def test_several_choices_share_a_prompt_and_differ(make: Make) -> None:
    core = make()
    prompt = text(2, 100)
    events = ask(core, prompt, sampled(n=3))
    got = [answer(events, "a", i) for i in range(3)]
    assert len({tuple(g) for g in got}) == 3
    assert all(len(g) == 12 for g in got)
    assert core.stats().prefill_tokens <= 100 + 2 * 16, "the prompt was computed once"
    assert end_of(events, "a").answer_tokens == 36
    assert end_of(events, "a").prompt_tokens == 100
    assert got[0] == answer(ask(make(), prompt, sampled()), "a")
    again = ask(make(), prompt, sampled(n=3))
    assert [answer(again, "a", i) for i in range(3)] == got
    one = sampled(choice_seed(7, 2))
    assert answer(ask(make(), prompt, one), "a") == got[2]
    assert_all_free(core)


def test_greedy_choices_are_equal(make: Make, greedy: list[int]) -> None:
    events = ask(make(), PROMPT, free_run(n=2))
    assert list(answers(events).values()) == [greedy, greedy]


def test_one_choice_may_end_before_the_others(make: Make) -> None:
    core = make()
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=sampled(n=3)))
    events = []
    while len(answers(events)) < 3:
        events += core.step()
    core.stop("a", 1)
    events += drain(core)
    ends = [choice_end(events, "a", i).reason for i in range(3)]
    assert ends == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert_all_free(core)


def test_choices_whose_leader_is_gone_still_finish(make: Make) -> None:
    core = make(budget=16)
    core.add(Request(request_id="a", prompt_ids=text(1, 100), params=sampled(n=3)))
    core.step()
    core.stop("a", 0)
    events = drain(core)
    assert [len(answer(events, "a", i)) for i in range(3)] == [0, 12, 12]


class Alternating(TokenMask):
    """Allows 5 and 6 in turn, six tokens long."""

    def __init__(self, made: Sequence[int] = ()) -> None:
        self.made = list(made)

    def allowed_words(self) -> Sequence[int]:
        words = np.zeros(10, dtype=np.int32)
        words[0] = 1 << (5 + len(self.made) % 2)
        return words

    def advance(self, token_id: int) -> None:
        self.made.append(token_id)

    def is_complete(self) -> bool:
        return len(self.made) == 6

    def copy(self) -> Alternating:
        return Alternating(self.made)


def test_a_mask_holds_at_any_temperature_and_each_choice_has_its_own(make: Make) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=30, n=2, ignore_eos=True)
    events = ask(make(), PROMPT, params, token_mask=Alternating())
    for i in range(2):
        assert answer(events, "a", i) == [5, 6, 5, 6, 5, 6]
        assert choice_end(events, "a", i).reason is FinishReason.STOP


class Impossible(Alternating):
    """Allows nothing from the third token on."""

    def allowed_words(self) -> Sequence[int]:
        return super().allowed_words() if len(self.made) < 2 else np.zeros(10, dtype=np.int32)

    def copy(self) -> Impossible:
        return Impossible(self.made)


def test_a_mask_that_allows_nothing_fails_its_request_only(make: Make, greedy: list[int]) -> None:
    core = make()
    core.add(Request(request_id="x", prompt_ids=PROMPT, params=free_run(), token_mask=Impossible()))
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=free_run()))
    events = drain(core)
    assert choice_end(events, "x").reason is FinishReason.FAILED
    assert "allows no token" in choice_end(events, "x").message
    assert answer(events, "x") == [5, 6]
    assert answer(events, "a") == greedy
    assert_all_free(core)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: float("nan")}),
        ("n", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field
    assert refused.value.code == "invalid_value"


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_generate_returns_answers_in_order(make: Make, model: HybridModel) -> None:
    core = make()
    prompts = [text(3, 40), text(4, 5), text(5, 18)]
    done = generate(core, prompts, GREEDY)
    for prompt, got in zip(prompts, done, strict=True):
        assert got.choices[0].token_ids == alone(model, prompt, 12)
        assert got.choices[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError):
        generate(core, [text(3, 4), []], GREEDY)
    assert not core.has_work
