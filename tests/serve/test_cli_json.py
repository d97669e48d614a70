"""Every command with --json ends its standard output with one JSON object, done or failed."""

import io
import json
import sys
from pathlib import Path

import pytest

from oxplow.serve import cli
from tests.serve.test_cli import COMMANDS

NOWHERE = ("--model", "/nowhere")
NO_SERVER = ("--url", "http://127.0.0.1:9")
# How each command is called here; MODEL, IN, OUT and FOLDER are put in. A failure that is expected
# ends in JSON too, so commands that take minutes are asked for a model that is not there.
CALLS: dict[str, tuple[str, ...]] = {
    "batch": ("IN", "OUT", "--model", "MODEL"),
    "bench decode": NOWHERE,
    "bench op": ("rms_norm", "--device", "none"),
    "bench prefill": NOWHERE,
    "bench sweep": ("prefill_tokens", *NOWHERE),
    "calibrate": ("--device", "none", "--folder", "FOLDER"),
    "chat": ("--model", "MODEL"),
    "config": ("--show",),
    "doctor": (),
    "eval": NOWHERE,
    "explain": (),
    "generate": ("abc", "--model", "MODEL"),
    "serve": NOWHERE,
    "sessions list": NO_SERVER,
    "sessions load": ("x", *NO_SERVER),
    "sessions save": ("x", *NO_SERVER),
    "sessions show": ("x", *NO_SERVER),
}
FAILS = {name for name, call in CALLS.items() if NOWHERE[1] in call or NO_SERVER[1] in call}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_last_line_is_one_json_object(
    command: list[str],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    places = {
        "MODEL": model_dir,
        "IN": tmp_path / "in.jsonl",
        "OUT": tmp_path / "out.jsonl",
        "FOLDER": tmp_path,
    }
    name = " ".join(command)
    call = [str(places.get(word, word)) for word in CALLS.get(name, NOWHERE)]
    monkeypatch.setattr(sys, "argv", ["oxplow", *command, *call, "--json"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("</think>hi\n"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capfd.readouterr()
    if name not in CALLS and "Usage:" in shown.err:
        pytest.skip("CALLS does not say how to call it")
    told = json.loads(shown.out.splitlines()[-1])
    assert isinstance(told, dict), shown.out
    if name in FAILS:
        assert (ended.value.code, set(told)) == (2, {"error"})
        assert "oxplow: " in shown.err
        assert "Traceback" not in shown.err
