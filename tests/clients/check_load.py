"""Programs that load, sweep and fuzz servers: aiperf, guidellm, schemathesis.

Each is found on the path or in the folders of OXPLOW_CLIENT_PROGRAMS; they bring libraries of their
own, so each lives best in an environment of its own. None reaches anything but loopback.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from oxplow.serve.model_files import default_model
from tests.serve.running import Running

FOLDERS = os.environ.get("OXPLOW_CLIENT_PROGRAMS", "")
NOWHERE = "http://127.0.0.1:9"  # a closed port, in place of the hub
# Its checks that our document answers for; the rest judge what no description can say (the budget
# that the context still holds, fields that depend on others).
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,unsupported_method"


def run(name: str, *args: str, home: Path, **variables: str) -> str:
    """Run a program and return what it printed; skips where it is not installed."""
    found = shutil.which(name, path=f"{FOLDERS}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed; OXPLOW_CLIENT_PROGRAMS names its folder")
    done = subprocess.run(
        [found, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
        cwd=home,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **variables},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_aiperf_counts_every_request(served: Running, tmp_path: Path) -> None:
    run(
        "aiperf", "profile", "--model", "tiny", "--url", served.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(default_model()), "--concurrency", "2",
        "--request-count", "6", "--isl", "20", "--osl", "8", "--no-gpu-telemetry",
        "--no-server-metrics", "--output-artifact-dir", str(tmp_path / "out"), "--ui", "simple",
        home=tmp_path, HF_ENDPOINT=NOWHERE,
    )  # fmt: skip
    told = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 6
    assert not told.get("error_request_count")


def test_guidellm_finishes_every_request(served: Running, tmp_path: Path) -> None:
    shown = run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={served.url},model=tiny",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={default_model()}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--disable-console-interactive", home=tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    counts = re.findall(r"successful=(\d+) errored=(\d+)", shown)
    assert counts and all(errored == "0" for _, errored in counts), shown[-2000:]
    assert (tmp_path / "benchmarks.json").exists()


def test_schemathesis_finds_no_fault(served: Running, tmp_path: Path) -> None:
    run(
        "schemathesis", "run", f"{served.url}/openapi.json", "--checks", CHECKS,
        "--max-examples", "25", "--request-timeout", "60", "--seed", "1", "--no-color",
        "--continue-on-failure", home=tmp_path,
    )  # fmt: skip
    assert served.chat("</think>still here").status_code == 200
