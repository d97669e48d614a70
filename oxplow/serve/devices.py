"""From a device's name to a torch device that answers.

Owns the check and its message. Knows no command. Invariant: a device that torch does not reach is
an error before any work is started.
"""

from __future__ import annotations

import torch

from oxplow.errors import ConfigError
from oxplow.serve.machine import devices_that_answer

__all__ = ["torch_device"]


def torch_device(name: str) -> torch.device:
    """Return the device called `name` (cpu, cuda:1). Raises ConfigError where none answers."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("this is no torch device", got=name, wanted="cpu or cuda:0") from error
    known = ("cpu", *devices_that_answer())
    if device.type not in {k.partition(":")[0] for k in known}:
        raise ConfigError("this device does not answer", got=name, wanted=", ".join(known))
    return device
