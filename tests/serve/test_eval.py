"""`oxplow eval` on a tiny random model: every figure against an independent computation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import oxplow.feedback.exam as exam
from oxplow.config import load_config
from oxplow.errors import ConfigError
from oxplow.feedback.exam import QUICK, Chat, ToolCall
from oxplow.model.caches import CacheTensors
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel, StepOutput
from oxplow.model.step import StepInput, build_step
from oxplow.ops.table import OpTable
from oxplow.serve import cli
from oxplow.serve.engine_port import Delta, EngineInfo, EngineStats, Work, unpack_ids
from oxplow.serve.evaluation import EngineExaminee, EvalSettings, open_examinee
from oxplow.serve.text import Vocabulary, load_text
from oxplow.serve.text_reading import TextReader
from tests.drive import Driver
from tests.model.build import our_table
from tests.oracles.fixtures import GlmBuilder

TEXT = "The quick brown fox jumps over the lazy dog; every word here is plain. " * 40
TINY = replace(
    QUICK, haystacks={1024: 1}, windows=2, window_tokens=96, calls=2, json=2, pictures=3,
    swapped=3, drafts=2, draft_prompt=24, draft_tokens=6,
)  # fmt: skip
runner = CliRunner()


@pytest.fixture(scope="module")
def directory(glm_oracle: GlmBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with the nano's chat template, which knows pictures and tools."""
    folder = tmp_path_factory.mktemp("eval") / "tiny"
    shutil.copytree(glm_oracle(), folder)
    template = Path(__file__).parents[2] / "training" / "chat_template.jinja"
    shutil.copyfile(template, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="module")
def ops() -> OpTable:
    return our_table()


@pytest.fixture(scope="module")
def model(directory: Path, ops: OpTable) -> HybridModel:
    return load_model(directory, ops, LoadOptions(block_size=64))


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> Vocabulary:
    return load_text(directory).vocabulary


@pytest.fixture(scope="module")
def reader(model: HybridModel, ops: OpTable, vocabulary: Vocabulary) -> TextReader:
    return TextReader(model, ops, vocabulary)


@pytest.fixture(scope="module")
def examinee(directory: Path) -> EngineExaminee:
    runtime = load_config(None, {"compute.device": "cpu", "compute.threads": 1}, {}).runtime
    return open_examinee(directory, EvalSettings(), runtime, 1400)[0]


def draft_logits(model: HybridModel, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the trunk's and the draft block's logits over a text, each in a single step."""
    driver = Driver(model)
    trunk = driver.step({"trunk": ids})["trunk"]
    rows = driver.rows("draft", ids[:-1])
    step = build_step([rows], block_size=model.block_size, device=torch.device("cpu"))
    hidden, following = driver.hidden[:-1], torch.tensor(ids[1:])
    return trunk, model.draft(hidden, following, step, driver.caches).logits


def test_loss_and_bytes_are_those_of_the_whole_window(
    model: HybridModel, reader: TextReader, vocabulary: Vocabulary
) -> None:
    windows = list(reader.read("code", TEXT, 2, 700))  # two chunks, the second one ragged
    starts = (TEXT, TEXT[-700 * 6 :])  # the first window and the last; 701 tokens of one byte each
    for window, text in zip(windows, starts, strict=True):
        ids = vocabulary.encode_plain(text)[:701]
        logits = Driver(model).step({"a": ids[:-1]})["a"].double()
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
        assert window.nats == pytest.approx(float(wanted), rel=1e-5)
        assert (window.num_tokens, window.num_bytes) == (700, 700)


def test_teacher_forced_guesses_are_compared_with_the_model_s_own_word(
    model: HybridModel, reader: TextReader, vocabulary: Vocabulary
) -> None:
    window = next(reader.read("code", TEXT, 1, 600))
    trunk, draft = draft_logits(model, vocabulary.encode_plain(TEXT)[:601])
    agree = draft.argmax(-1)[:-1] == trunk.argmax(-1)[1:-1]
    assert window.drafted == agree.numel() == 599
    # near ties of a random model may fall either way between two chunkings
    assert abs(window.accepted - int(agree.sum())) <= 2


def test_own_continuation_is_greedy_and_its_guesses_are_the_draft_block_s(
    model: HybridModel, reader: TextReader, vocabulary: Vocabulary
) -> None:
    for number, run in enumerate(reader.write("code", TEXT, 3, 70, 12)):
        start = max(0, len(TEXT) - 70 * 6) * number // 2
        prompt = vocabulary.encode_plain(TEXT[start:])[:70]
        driver = Driver(model)
        said = driver.greedy("a", driver.step({"a": prompt})["a"][-1], 12)
        _, draft = draft_logits(model, [*prompt, *said])
        guesses = draft.argmax(-1)[69:-1].tolist()  # row t sees token t+1 and says token t+2
        assert (run.drafted, run.distinct) == (11, len(set(said)))
        assert run.accepted == sum(g == t for g, t in zip(guesses, said[1:], strict=True))


class Chain:
    """A model whose next token is 7 times the last one plus 3; its draft block knows that."""

    block_size = 64
    draft_block = object()
    components = staticmethod(tuple)

    def forward(self, step: StepInput, caches: CacheTensors) -> StepOutput:
        return self._out(step.token_ids, step)

    def draft(
        self, hidden: Tensor, next_token_ids: Tensor, step: StepInput, caches: CacheTensors
    ) -> StepOutput:
        assert torch.equal(hidden, self._out(step.token_ids, step).hidden)
        return self._out(next_token_ids, step)

    def project(self, hidden: Tensor) -> Tensor:
        return hidden

    def _out(self, ids: Tensor, step: StepInput) -> StepOutput:
        hidden = torch.nn.functional.one_hot((7 * ids + 3) % 320, 320).float()
        return StepOutput(hidden=hidden, logits=hidden[step.logit_rows])


def test_guesses_of_a_perfect_draft_block_are_all_accepted(
    ops: OpTable, vocabulary: Vocabulary
) -> None:
    reader = TextReader(Chain(), ops, vocabulary)  # type: ignore[arg-type]
    window = next(reader.read("code", TEXT, 1, 700))
    assert (window.drafted, window.accepted) == (699, 699)
    for run in reader.write("code", TEXT, 3, 70, 12):
        assert (run.drafted, run.accepted) == (11, 11)
        assert run.distinct > 8


def test_too_short_a_text_is_refused(reader: TextReader) -> None:
    with pytest.raises(ConfigError, match="too short"):
        next(reader.read("code", "brief", 1, 64))


def chat(text: str) -> Chat:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12}


def test_answers_of_a_shared_prefix_equal_those_asked_alone(
    directory: Path, examinee: EngineExaminee
) -> None:
    chats = [chat(TEXT[:700] + f"\n\nQuestion {n}?") for n in range(4)]
    together = examinee.ask(chats)
    assert all(a.cached_tokens >= 640 for a in together)  # all but the last block of the prefix
    runtime = load_config(None, {"compute.device": "cpu", "compute.threads": 1}, {}).runtime
    for one, answer in zip(chats, together, strict=True):
        fresh, _ = open_examinee(directory, EvalSettings(), runtime, 1400)
        alone = fresh.ask([one])[0]
        assert alone.cached_tokens == 0
        assert (alone.text, alone.calls, alone.end) == (answer.text, answer.calls, answer.end)


def test_model_without_a_chat_template_is_refused_item_by_item(
    directory: Path, reader: TextReader, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(directory, bare)
    (bare / "chat_template.jinja").unlink()
    answer = EngineExaminee(bare, Scripted("so", vocabulary), reader).ask([chat("Hi")])[0]
    assert answer.end == "refused" and "chat template" in answer.text


def test_thinking_that_cannot_be_off_gets_room_of_its_own(
    glm_oracle: GlmBuilder, reader: TextReader, vocabulary: Vocabulary
) -> None:
    core = Scripted("because</think>so", vocabulary)
    answer = EngineExaminee(glm_oracle(), core, reader).ask([chat("Hi")])[0]
    assert answer.text == "so"
    assert core.works[0].params.max_tokens == 12 + 512


def test_too_long_a_chat_is_told_and_the_others_are_answered(examinee: EngineExaminee) -> None:
    long, short = examinee.ask([chat(TEXT), chat("Hi")])
    assert long.end == "refused" and "context" in long.text
    assert short.end in ("stop", "length")


class Scripted:
    """An engine that says a given text whatever is asked."""

    info = EngineInfo(max_model_len=4096, vocab_size=320, eos_token_ids=(0,))
    predicted_s = 0.0

    def __init__(self, said: str, vocabulary: Vocabulary) -> None:
        self._said = tuple(vocabulary.encode_template(said))
        self.works: list[Work] = []
        self._open: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add(self, work: Work) -> None:
        self.works.append(work)
        self._open.append(work.request_id)

    def step(self) -> Sequence[Delta]:
        names, self._open = self._open, []
        return [
            Delta(request_id=n, index=0, token_ids=self._said, finish="stop", cached_tokens=7)
            for n in names
        ]

    def abort(self, request_id: str) -> None: ...

    def end_choice(self, request_id: str, index: int) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()


def test_call_is_read_by_the_parser_of_the_served_path(
    directory: Path, reader: TextReader, vocabulary: Vocabulary
) -> None:
    said = (
        "<tool_call>brew_coffee<arg_key>roast</arg_key><arg_value>12</arg_value>"
        "<arg_key>cups</arg_key><arg_value>3</arg_value></tool_call><|observation|>"
    )
    core = Scripted(said, vocabulary)
    brew = next(t for t in exam.build_tool_items(60) if t.name == "brew_coffee")
    answer = EngineExaminee(directory, core, reader).ask(
        [{"messages": brew.messages, "tools": brew.tools, "max_tokens": 9}]
    )[0]
    assert answer.calls == (ToolCall("brew_coffee", '{"roast": "12", "cups": 3}'),)
    assert (answer.end, answer.text, answer.cached_tokens) == ("tool_calls", "", 7)
    params = core.works[0].params
    assert (params.temperature, params.top_p) == (0.0, 1.0)
    prompt = vocabulary.decode(unpack_ids(core.works[0].prompt), skip_special=False)
    assert brew.messages[0]["content"] in prompt
    assert prompt.endswith("<|assistant|><think></think>")


def test_attending_everywhere_equals_selecting_everything(
    directory: Path, ops: OpTable, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    wide = tmp_path / "wide"
    shutil.copytree(directory, wide)
    config = json.loads((wide / "config.json").read_text())
    config["text_config"]["index_topk"] = 1024
    (wide / "config.json").write_text(json.dumps(config))
    ids = vocabulary.encode_plain(TEXT)[:300]

    def logits(folder: Path, **options: bool) -> Tensor:
        return Driver(load_model(folder, ops, LoadOptions(**options))).step({"a": ids})["a"]

    dense = logits(directory, attend_all=True)
    assert float((dense - logits(wide, always_select=True)).abs().max()) <= 1e-4
    assert float((dense - logits(directory)).abs().max()) > 1e-2  # selection is at work


@pytest.mark.parametrize(
    "text", ["weights=int3", "attention=none", "weights", "colour=red", "weights="]
)
def test_settings_that_do_not_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EvalSettings.parse(text)


def test_unset_weights_follow_the_arithmetic() -> None:
    parsed = EvalSettings.parse("attention=dense, compute.activation_dtype=bfloat16")
    assert parsed.attention == "dense"
    assert parsed.assignments == {"compute.activation_dtype": "bfloat16"}
    assert (parsed.weights_for("float32"), parsed.weights_for("bfloat16")) == ("fp32", "stored")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "QUICK", TINY)
    for name in ("_CALL_TOKENS", "_JSON_TOKENS", "_NEEDLE_TOKENS"):
        monkeypatch.setattr(f"oxplow.feedback.exam.runner.{name}", 6)


def last_json(*args: str) -> dict[str, object]:
    command = ["--set", "compute.threads=1", "eval", "--quick", *args, "--json"]
    done = runner.invoke(cli.app, command)
    assert done.exit_code == 0, done.exception
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(told, dict)
    return told


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_command_reports_every_figure_and_keeps_every_item(directory: Path, tmp_path: Path) -> None:
    saved, log = tmp_path / "run.json", tmp_path / "log.jsonl"
    told = last_json("--model", str(directory), "--save", str(saved), "--append", str(log))
    assert set(told["bits_per_byte"]) == {"code", "prose"}  # type: ignore[call-overload]
    assert set(told["needle"]) == {"1024"}  # type: ignore[call-overload]
    for name in ("tool_call", "json", "picture", "mtp_acceptance", "seconds", "cpu_seconds"):
        assert isinstance(told[name], float), name
    assert told["held_out"] == {"code": ["networkx", "pygments"], "prose": ["pydoc_data.topics"]}
    assert told["settings"] == {"weights": "fp32", "attention": "sparse"}
    assert json.loads(log.read_text()) == told
    assert told["command"] == (f"oxplow --set compute.threads=1 eval --quick --model {directory}")
    kept = exam.load_result(saved)
    assert len(kept.outcomes) == 16 + 2 + 2 + 3 + 3
    assert kept.failures == 0
    again = last_json("--compare", str(saved), str(saved))
    assert all(f["lost"] == f["gained"] == 0 for f in again["flips"].values())  # type: ignore


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_two_settings_are_compared_on_the_same_items(directory: Path, tmp_path: Path) -> None:
    keep = tmp_path / "pair.json"
    told = last_json(
        "--model", str(directory), "--only", "text,json,needle", "--lengths", "1024",
        "--save", str(keep),
        "--compare", "attention=sparse", "attention=dense",
    )  # fmt: skip
    assert told["unpaired"] == 0
    assert set(told["flips"]) == {"json", "needle_1024"}  # type: ignore[call-overload]
    change = told["changes"]["bits per byte, code"]  # type: ignore[index]
    assert change["difference"]["value"] == pytest.approx(change["b"] - change["a"])
    assert change["difference"]["value"] != 0
    sides = [exam.load_result(tmp_path / f"pair-{n}.json").about["settings"] for n in "ab"]
    assert [s["attention"] for s in sides] == ["sparse", "dense"]


def test_settings_beside_a_comparison_are_refused(directory: Path) -> None:
    args = ["eval", "--settings", "weights=bf16", "--compare", "default", "weights=bf16"]
    done = runner.invoke(cli.app, args)
    assert isinstance(done.exception, ConfigError)


def test_length_that_the_plan_lacks_is_refused() -> None:
    done = runner.invoke(cli.app, ["eval", "--model", "gone", "--lengths", "1024,1025"])
    assert str(done.exception).startswith("the plan has no such length; got 1025; wanted 1024, ")


def test_folder_that_is_not_there_is_told_before_the_work(tmp_path: Path) -> None:
    for option in ("--save", "--append"):
        args = ["eval", "--model", "gone", option, str(tmp_path / "gone" / "x.json")]
        assert "no such folder" in str(runner.invoke(cli.app, args).exception)


def test_missing_model_and_missing_file_are_told(tmp_path: Path) -> None:
    for args in (["--model", str(tmp_path)], ["--compare", "gone.json", "gone.json"]):
        assert isinstance(runner.invoke(cli.app, ["eval", *args]).exception, ConfigError)
