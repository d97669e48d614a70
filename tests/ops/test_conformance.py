"""Every kernel against every case of its contract, in every activation dtype: generated, never
hand-written.
"""

from __future__ import annotations

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Role
from oxplow.feedback.gate import examine
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, Kernel

CPU = torch.device("cpu")


def _variants(op: str) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return (activation, weight) dtypes: every declared one, and bfloat16 weights under float32
    arithmetic.
    """
    contract = CONTRACTS[op]
    variants = [(dtype, dtype) for dtype in contract.dtypes]
    if any(spec.role is Role.WEIGHT for spec in contract.inputs.values()):
        variants.append((torch.float32, torch.bfloat16))
    return variants


def _crossed() -> list[pytest.param]:
    return [
        pytest.param(
            kernel,
            case.name,
            dtypes,
            id=f"{kernel.op}-{kernel.name}-{case.name}-{dtypes[0]}-{dtypes[1]}",
            marks=[] if dtypes == (torch.float32, torch.float32) else [pytest.mark.slow],
        )
        for kernel in builtin_kernels()
        for case in CONTRACTS[kernel.op].cases
        for dtypes in _variants(kernel.op)
    ]


def _conform(
    kernel: Kernel, case: str, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    dtype, weight = dtypes
    support = kernel.supports(Facts(device=device, dtype=dtype))
    if not support.ok:
        pytest.skip(support.reason)
    contract = CONTRACTS[kernel.op]
    # one call: the examination draws a second set of values itself
    finding = examine(
        contract,
        kernel.name,
        kernel.run,
        contract.case(case),
        dtype=dtype,
        weight=weight,
        device=device,
    )
    assert finding.ok, str(finding)


@pytest.mark.parametrize(("kernel", "case", "dtypes"), _crossed())
def test_kernel_conforms_to_its_contract(
    kernel: Kernel, case: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    _conform(kernel, case, dtypes, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "case", "dtypes"), _crossed() if torch.accelerator.is_available() else []
)
def test_kernel_conforms_on_the_accelerator(
    kernel: Kernel, case: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    _conform(kernel, case, dtypes, torch.device(torch.accelerator.current_accelerator()))


def test_every_contract_has_a_portable_kernel() -> None:
    portable = {
        k.op for k in builtin_kernels() if k.supports(Facts(device=CPU, dtype=torch.float32)).ok
    }
    assert sorted(set(CONTRACTS) - portable) == []
