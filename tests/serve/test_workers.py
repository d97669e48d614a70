"""Workers: a job whose client left ends, and takes neither its neighbours nor the server along."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from oxplow.serve.prepare.prepared import PrepareSettings
from oxplow.serve.workers import WorkerPool
from tests.serve.model_dir import write_model_files
from tests.serve.running import options, running


def hold(settings: PrepareSettings, folder: str, seconds: float) -> int:
    """Say in `folder` that the job began, then be busy; runs in a worker."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(seconds)
    return os.getpid()


def pid_of(settings: PrepareSettings) -> int:
    """Return the worker's process."""
    return os.getpid()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PrepareSettings:
    return PrepareSettings(
        directory=write_model_files(tmp_path_factory.mktemp("model")), names=("a",)
    )


def test_a_job_whose_client_left_ends_with_its_process(
    settings: PrepareSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oxplow.serve.workers._LEAVE_S", 0.2)

    async def go() -> None:
        pool = WorkerPool(settings)
        await pool.start()
        try:
            first = await pool.run(pid_of, num_bytes=1)
            busy = asyncio.ensure_future(pool.run(hold, str(tmp_path), 600.0, num_bytes=1))
            while not list(tmp_path.iterdir()):
                await asyncio.sleep(0.05)
            waits = [asyncio.ensure_future(pool.run(pid_of, num_bytes=1)) for _ in range(3)]
            await asyncio.sleep(0.1)
            busy.cancel()
            fresh = await asyncio.wait_for(asyncio.gather(*waits), 30)
            assert len(set(fresh)) == 1 and fresh[0] != first
            with pytest.raises(ProcessLookupError):
                for _ in range(100):
                    os.kill(first, 0)
                    await asyncio.sleep(0.05)
        finally:
            pool.close()

    asyncio.run(go())


def test_a_short_job_that_is_cancelled_costs_no_process(
    settings: PrepareSettings, tmp_path: Path
) -> None:
    async def go() -> None:
        pool = WorkerPool(settings)
        await pool.start()
        try:
            first = await pool.run(pid_of, num_bytes=1)
            for _ in range(3):
                job = asyncio.ensure_future(pool.run(hold, str(tmp_path), 0.2, num_bytes=1))
                await asyncio.sleep(0.05)
                job.cancel()
                queued = asyncio.ensure_future(pool.run(pid_of, num_bytes=1))
                await asyncio.sleep(0.01)
                queued.cancel()
            assert await pool.run(pid_of, num_bytes=1) == first
        finally:
            pool.close()

    asyncio.run(go())


@pytest.mark.parametrize("is_inprocess", [True, False])
def test_a_body_that_cannot_fit_is_refused_in_seconds(tmp_path: Path, is_inprocess: bool) -> None:
    folder = write_model_files(tmp_path)
    with running(options(folder, is_inprocess=is_inprocess)) as server:
        long = {"messages": [{"role": "user", "content": "word " * 5_000_000}]}
        began = time.monotonic()
        refused = server.client.post("/v1/chat/completions", json=long)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            body = {**long, "max_tokens": 5}
            assert server.client.post(path, json=body).status_code == 400
        ids = {"prompt": [1] * 3_000_000}
        assert server.client.post("/v1/completions", json=ids).status_code == 400
        assert time.monotonic() - began < 30
        assert server.chat("</think>hi").status_code == 200


def test_a_client_that_leaves_while_its_text_is_read_frees_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oxplow.serve.workers._LEAVE_S", 0.1)
    folder = write_model_files(tmp_path)
    prompt = "x " * 8_000_000
    with running(options(folder, is_inprocess=False, max_model_len=1 << 24)) as server:
        with pytest.raises(httpx.TimeoutException):
            server.client.post("/tokenize", json={"prompt": prompt}, timeout=0.3)
        assert server.chat("</think>hi " + "y" * 70_000).status_code == 200
