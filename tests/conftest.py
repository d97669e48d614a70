"""Settings that every test shares: offline, one hypothesis profile, devices looked at once."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Nothing in the suite may reach for a hub; transformers honours these before its import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

# No deadline: on a shared machine an example may take any time. CI repeats the same examples.
settings.register_profile(
    "oxplow", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("oxplow")


# Modules of many seconds: whole suites of bit comparisons, processes and media. `make quick` skips
# them; the ops keep their float32 conformance there.
SLOW_MODULES = {
    "faults/test_trials.py",
    "feedback/test_attribute.py",
    "feedback/test_attribute_off.py",
    "feedback/test_bench_op.py",
    "feedback/test_bisect.py",
    "feedback/test_exam_run.py",
    "feedback/test_gate.py",
    "feedback/test_isolate.py",
    "feedback/test_isolate_shapes.py",
    "feedback/test_segments.py",
    "feedback/test_shrink.py",
    "feedback/test_starvation.py",
    "model/test_nano.py",
    "ops/test_invariance_dense.py",
    "ops/test_invariance_hyper.py",
    "ops/test_invariance_kda.py",
    "ops/test_invariance_mla.py",
    "ops/test_invariance_moe.py",
    "ops/test_invariance_sampling.py",
    "ops/test_invariance_vision.py",
    "ops/test_kda.py",
    "ops/test_mla.py",
    "ops/test_moe.py",
    "ops/test_vision.py",
    "serve/test_agent_apis.py",
    "serve/test_chat_api.py",
    "serve/test_check.py",
    "serve/test_images.py",
    "serve/test_pictures_api.py",
    "serve/test_process.py",
    "serve/test_quarantine.py",
    "serve/test_sessions.py",
    "serve/test_slices.py",
    "serve/test_streams.py",
    "serve/test_text.py",
    "serve/test_video.py",
    "serve/test_workers.py",
}


@pytest.fixture(autouse=True)
def _log_handlers_end_with_the_test() -> Iterator[None]:
    """Take away handlers that a test left: their stream is closed, the next test would see that."""
    loggers = (logging.getLogger(), logging.getLogger("oxplow"))
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, kept in zip(loggers, before, strict=True):
        for handler in [h for h in logger.handlers if h not in kept]:
            logger.removeHandler(handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow modules; skip tests that need accelerators this machine lacks, and say so."""
    tests = Path(__file__).parent
    for item in items:
        inside = item.path.is_relative_to(tests)
        if inside and item.path.relative_to(tests).as_posix() in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)
    marked = [i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("multi_gpu")]
    if not marked:
        return
    import torch

    present = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item in marked:
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1
        if present < wanted:
            reason = f"needs {wanted} accelerator(s), this machine has {present}"
            item.add_marker(pytest.mark.skip(reason=reason))
