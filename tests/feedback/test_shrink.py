"""The shrinker: small calls that still fail for the same reason, and files that show it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from oxplow.contracts import CONTRACTS
from oxplow.feedback.gate import Reason
from oxplow.feedback.isolate import load_candidate
from oxplow.feedback.shrink import replay, repro_file, shrink
from oxplow.ops.kernels import builtin_kernels
from oxplow.serve.cli import app
from tests.oracles.fixtures import GlmBuilder

FAULT = """
import torch


def late_column(x, weight, *, eps):
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    if WRONG:
        y[..., 5:] *= 1 + 2.0**-10
    return y
"""


def _fault(folder: Path, *, wrong: bool = True) -> str:
    path = folder / "fault.py"
    path.write_text(f"WRONG = {wrong}\n{FAULT}")
    return f"{path}:late_column"


def _ran(path: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=False, env=env
    )


def test_it_finds_the_least_axes_and_plain_values(tmp_path: Path) -> None:
    found = shrink(CONTRACTS["rms_norm"], load_candidate(_fault(tmp_path), "rms_norm"))
    assert found is not None
    assert (found.ruling.reason, found.ruling.tensor) == (Reason.NUMERICS, "y")
    assert found.args["x"].shape == (1, 6)  # the fault starts in the sixth column
    assert found.elements_after == 12 < found.elements_before
    assert torch.equal(found.args["weight"], torch.ones(6))


def test_its_file_fails_with_the_fault_and_passes_without(tmp_path: Path) -> None:
    spec = _fault(tmp_path)
    found = shrink(CONTRACTS["rms_norm"], load_candidate(spec, "rms_norm"))
    assert found is not None
    path = tmp_path / "repro.py"
    path.write_text(repro_file(found, spec))
    failing = _ran(path)
    assert failing.returncode == 1, failing.stderr
    assert "numerics at y" in failing.stdout
    _fault(tmp_path, wrong=False)
    mended = _ran(path)
    assert mended.returncode == 0, mended.stdout + mended.stderr


def test_check_writes_the_file_of_a_red_op(tmp_path: Path, glm_oracle: GlmBuilder) -> None:
    words = ["check", "--model", str(glm_oracle(0)), "--quick", "--only", "ops:swiglu", "--json"]
    path = tmp_path / "small.py"
    words += ["--shrink", str(path)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout.splitlines()[-1])["shrunk"] is None
    assert not path.exists()
    kernels = [(k, k.run) for k in builtin_kernels() if k.op == "swiglu"]
    for kernel, real in kernels:
        wrong = partial(_scaled, real)
        object.__setattr__(kernel, "run", wrong)
    try:
        told = CliRunner().invoke(app, words)
    finally:
        for kernel, real in kernels:
            object.__setattr__(kernel, "run", real)
    assert told.exit_code == 1, told.output
    command = json.loads(told.stdout.splitlines()[-1])["shrunk"]
    assert shlex.split(command) == ["python", str(path)]
    assert _ran(path).returncode == 0  # the plant lived in this process only


def _scaled(real: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
    return real(*given, **named) * (1 + 2.0**-10)


def test_a_sound_kernel_gives_nothing_to_shrink() -> None:
    kernel = next(k for k in builtin_kernels() if k.op == "rms_norm")
    assert shrink(CONTRACTS["rms_norm"], kernel.run) is None


def test_indices_and_pools_stay_a_case_of_the_op() -> None:
    """A state kernel that loses its decay: pools, slots and lengths must still fit together."""
    contract = CONTRACTS["kda_decode"]
    sound = next(k for k in builtin_kernels() if k.op == "kda_decode").run

    def no_decay(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
        state_slots: Tensor,
    ) -> object:  # fmt: skip
        return sound(q, k, v, torch.zeros_like(g), beta, state, state_slots)

    found = shrink(contract, no_decay)
    assert found is not None
    contract.validate(found.args)
    assert found.elements_after < found.elements_before
    assert bool(found.args["g"].count_nonzero())  # a zero decay would hide the fault


def test_a_failure_that_comes_and_goes_is_not_written() -> None:
    calls = iter(range(10**6))

    def sometimes(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
        return y * (1 + 2.0**-10) if next(calls) == 0 else y

    assert shrink(CONTRACTS["rms_norm"], sometimes) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-45])
def test_what_a_file_holds_comes_back_bit_for_bit(value: float, tmp_path: Path) -> None:
    spec = _fault(tmp_path)
    found = shrink(CONTRACTS["rms_norm"], load_candidate(spec, "rms_norm"))
    assert found is not None
    x = torch.full((3, 7), value)
    found.args["x"] = x
    names: dict[str, object] = {"__name__": "read"}
    exec(repro_file(found, spec), names)  # our own text
    args = names["ARGS"]
    assert isinstance(args, dict)
    assert torch.equal(args["x"].view(torch.int32), x.view(torch.int32))


def test_replay_tells_a_sound_kernel_from_a_broken_one(tmp_path: Path) -> None:
    spec = _fault(tmp_path)
    found = shrink(CONTRACTS["rms_norm"], load_candidate(spec, "rms_norm"))
    assert found is not None
    names = [k.name for k in builtin_kernels() if k.op == "rms_norm"]
    assert replay("rms_norm", spec, found.args)[0] is False
    assert replay("rms_norm", f"kernel:{names[0]}", found.args)[0] is True
