"""The engine as a plain library: open a checkpoint, give prompts, get tokens.

Owns the order of opening (load, plan, allocate) and a loop that runs a batch of prompts to its
end. Knows no text: prompts and answers are token ids. Invariant: answers come in the order of the
prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from oxplow.cache.plan import CacheBudget, plan_cache
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, PromptDone, RequestEnd, TokenOut
from oxplow.engine.options import EngineOptions
from oxplow.engine.request import FinishReason, Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.engine.sampling import TokenLogprob
from oxplow.errors import OxplowError
from oxplow.model.load import LoadOptions, load_model
from oxplow.ops.table import OpTable
from oxplow.trace import EventRing

_SAMPLED_BYTES = 1 << 20  # of each end of a weight file, for its name


@dataclass(slots=True)
class Completion:
    """One choice's answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    message: str = ""


@dataclass(slots=True)
class Generation:
    """One prompt's answers, and what its prompt cost."""

    choices: list[Completion]
    cached_tokens: int = 0
    miss: str = ""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


def open_engine(
    directory: Path,
    ops: OpTable,
    budget: CacheBudget,
    *,
    load: LoadOptions | None = None,
    options: EngineOptions | None = None,
    ring: EventRing | None = None,
) -> EngineCore:
    """Load a checkpoint, plan the caches inside `budget`, and return a core ready for requests.

    Raises ConfigError or WeightError; nothing is kept where it does.
    """
    model = load_model(directory, ops, load)
    plan = plan_cache(trunk_components(model), model.block_size, budget)
    return EngineCore(model, ops, plan, options, revision=model_revision(directory), ring=ring)


def model_revision(directory: Path) -> str:
    """Name a checkpoint by content: its config, and size and both ends of every weight file.

    Equal on every machine; two revisions of one name differ. Reads 2 MiB of each file.
    """
    digest = blake2b(digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def generate(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    salt: str = "",
) -> list[Generation]:
    """Run prompts to their end and return their answers in order.

    Raises RequestError or CapacityError for the first prompt that is refused, after the others that
    were accepted have been aborted. A request that fails later says so in its completion.
    """
    each = _params_for(prompts, params)
    names = [f"prompt-{i}" for i in range(len(prompts))]
    done = {
        n: Generation([Completion() for _ in range(p.n)]) for n, p in zip(names, each, strict=True)
    }
    accepted: list[str] = []
    try:
        for name, ids, chosen in zip(names, prompts, each, strict=True):
            core.add(Request(request_id=name, prompt_ids=ids, params=chosen, salt=salt))
            accepted.append(name)
    except OxplowError:
        for name in accepted:
            core.abort(name)
        core.step()
        raise
    open_names = set(names)
    while open_names:
        for event in core.step():
            _note(done, event, open_names)
    return [done[name] for name in names]


def _params_for(
    prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    return list(params)


def _note(done: dict[str, Generation], event: object, open_names: set[str]) -> None:
    match event:
        case TokenOut():
            choice = done[event.request_id].choices[event.choice]
            choice.token_ids.append(event.token_id)
            choice.logprobs.append(event.logprob)
        case PromptDone():
            known = done[event.request_id]
            known.cached_tokens, known.miss = event.cached_tokens, event.miss
            known.prompt_logprobs = event.logprobs
        case ChoiceEnd():
            choice = done[event.request_id].choices[event.choice]
            choice.finish_reason, choice.message = event.reason, event.message
        case RequestEnd():
            open_names.discard(event.request_id)
