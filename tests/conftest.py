"""Settings that every test shares: offline, one hypothesis profile, devices looked at once."""

import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.oracles.fixtures"]

# Nothing in the suite may reach for a hub; transformers honours these before its import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

# No deadline: on a shared machine an example may take any time. CI repeats the same examples.
settings.register_profile(
    "oxplow", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true"
)
settings.load_profile("oxplow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need accelerators this machine lacks, and say so."""
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
