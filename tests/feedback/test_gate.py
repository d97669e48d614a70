"""The gate against candidates that cheat, cut corners or err in one place.

Each cheat says at which stage the gate must stop it. Null candidates and operands rounded like
TF32 are generated for every contract: a case list that lets one of them pass is too tame.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from oxplow.contracts import CONTRACTS
from oxplow.contracts.laws import Close
from oxplow.contracts.schema import Case, CaseKind
from oxplow.feedback.gate import Finding, Reason, examine, reference_values
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, Kernel

Run = Callable[..., Any]


def _honest(op: str) -> Run:
    return next(k for k in builtin_kernels() if k.op == op).run


def _examine(op: str, run: Run, case: str, dtype: torch.dtype = torch.float32) -> Finding:
    contract = CONTRACTS[op]
    return examine(contract, "candidate", run, contract.case(case), dtype=dtype)


# Cheats: each maker returns a fresh candidate, since most of them remember something.


def _replays_by_shape() -> Run:
    kept: dict[tuple[int, ...], Tensor] = {}

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = (*x.shape, *weight.shape)
        if shape not in kept:
            kept[shape] = functional.linear(x, weight, bias)
        return kept[shape].clone()

    return run


def _replays_by_address() -> Run:
    kept: dict[int, Tensor] = {}

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kept.setdefault(x.data_ptr(), functional.linear(x, weight, bias)).clone()

    return run


def _one_buffer_for_all_calls() -> Run:
    kept: list[Tensor] = []

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = functional.linear(x, weight, bias)
        if not kept or kept[0].shape != y.shape:
            kept[:] = [y]
        kept[0].copy_(y)
        return kept[0]

    return run


def _assumes_packed_rows() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        packed = torch.as_strided(x, x.shape, (x.shape[1], 1))
        return functional.linear(packed, weight, bias)

    return run


def _returns_input_through_numpy() -> Run:
    def run(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
        bound = math.inf if limit is None else limit
        y = functional.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
        alias = torch.from_numpy(up.numpy())
        alias.copy_(y)
        return alias

    return run


def _answers_lazily() -> Run:
    class Lazy(Tensor):
        """Stands for a result that is computed when somebody looks."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias).as_subclass(Lazy)

    return run


def _answers_sparsely() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias).to_sparse()

    return run


def _answers_elsewhere() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias).to("meta")

    return run


def _negates_lazily() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch._neg_view(-functional.linear(x, weight, bias))

    return run


def _answers_in_float16() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias).half()

    return run


def _picks_as_floats() -> Run:
    def run(**named: Any) -> Tensor:
        return _honest("index_select")(**named).float()

    return run


def _picks_in_one_byte() -> Run:
    def run(**named: Any) -> Tensor:
        return _honest("index_select")(**named).to(torch.int8)

    return run


def _writes_outside() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()).zero_()
        return functional.linear(x, weight, bias)

    return run


def _writes_beside_its_own_output() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        y.copy_(functional.linear(x, weight, bias))
        torch.as_strided(y, (1,), (1,), y.storage_offset() - 1).zero_()
        return y

    return run


def _leaves_strided_memory_unwritten() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty_strided((x.shape[0], weight.shape[0]), (1, x.shape[0]))
        y[:-1] = functional.linear(x[:-1], weight, bias)
        # what lies in fresh memory is often the answer of an earlier call
        return torch.where(y.isnan(), y, functional.linear(x, weight, bias))

    return run


def _changes_indices() -> Run:
    def run(**named: Any) -> Tensor:
        selected = _honest("index_select")(**named)
        named["block_table"].clamp_(min=0)
        return selected

    return run


def _swaps_the_state_for_another() -> Run:
    def run(**named: Any) -> Tensor:
        fresh = named["state"].clone()
        o = _honest("kda_decode")(**(named | {"state": fresh}))
        named["state"].set_(fresh)
        return o

    return run


def _transposes_its_input() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = functional.linear(x, weight, bias)
        weight.t_()
        return y

    return run


def _touches_up_neighbours() -> Run:
    def run(**named: Any) -> Tensor:
        o, state = _honest("kda_decode")(**named), named["state"]
        others = [s for s in range(len(state)) if s not in named["state_slots"].tolist()]
        state[others] *= 1 + 2.0**-24  # may round to itself in most places, not in all
        state[others] = state[others].nextafter(torch.tensor(math.inf))
        return o

    return run


def _overwrites_poison_with_infinity() -> Run:
    def run(**named: Any) -> Tensor:
        o, state = _honest("kda_decode")(**named), named["state"]
        state[state.isnan()] = math.inf
        return o

    return run


def _leaves_early() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise SystemExit(0)

    return run


def _patches(owner: Any, name: str, value: Any) -> Callable[[], Run]:
    def make() -> Run:
        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            setattr(owner, name, value)
            return x.new_zeros(x.shape[0], weight.shape[0])

        return run

    return make


def _sets(setter: Callable[[], None]) -> Callable[[], Run]:
    def make() -> Run:
        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            setter()
            return functional.linear(x, weight, bias)

        return run

    return make


def _accumulates_in_float16() -> Run:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = (x.half() @ weight.half().t()).float()
        return half if bias is None else half + bias

    return run


def _keeps_its_state_in_bfloat16() -> Run:
    def run(**named: Any) -> Tensor:
        o, state = _honest("kda_prefill")(**named), named["state"]
        state.copy_(state.bfloat16())
        return o

    return run


def _errs_on_the_second_call() -> Run:
    calls: list[int] = []

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(1)
        y = functional.linear(x, weight, bias)
        return y if len(calls) == 1 else y.nextafter(torch.tensor(math.inf))

    return run


CHEATS = [
    ("linear", "decode", _replays_by_shape, Reason.NUMERICS),
    ("linear", "decode", _replays_by_address, Reason.NUMERICS),
    ("linear", "decode", _one_buffer_for_all_calls, Reason.ALIAS),
    ("linear", "decode", _assumes_packed_rows, Reason.NUMERICS),
    ("swiglu", "decode", _returns_input_through_numpy, Reason.ALIAS),
    ("linear", "decode", _answers_lazily, Reason.FORM),
    ("linear", "decode", _answers_sparsely, Reason.FORM),
    ("linear", "decode", _answers_elsewhere, Reason.FORM),
    ("linear", "decode", _negates_lazily, Reason.FORM),
    ("linear", "decode", _answers_in_float16, Reason.FORM),
    ("index_select", "cached_prefixes", _picks_as_floats, Reason.FORM),
    ("index_select", "cached_prefixes", _picks_in_one_byte, Reason.FORM),
    ("linear", "decode", _writes_outside, Reason.FENCE),
    ("linear", "decode", _writes_beside_its_own_output, Reason.FENCE),
    ("linear", "decode", _leaves_strided_memory_unwritten, Reason.NUMERICS),
    ("index_select", "cached_prefixes", _changes_indices, Reason.UNTOUCHED),
    ("kda_decode", "padding_rows", _swaps_the_state_for_another, Reason.UNTOUCHED),
    ("linear", "decode", _transposes_its_input, Reason.UNTOUCHED),
    ("kda_decode", "padding_rows", _touches_up_neighbours, Reason.NUMERICS),
    ("kda_decode", "decode", _overwrites_poison_with_infinity, Reason.NUMERICS),
    ("linear", "decode", _leaves_early, Reason.RAISED),
    ("linear", "decode", _patches(torch, "equal", lambda *a: True), Reason.TAMPERED),
    ("linear", "decode", _patches(Tensor, "__eq__", lambda *a: True), Reason.TAMPERED),
    ("linear", "decode", _patches(Close, "judge", lambda *a: None), Reason.TAMPERED),
    ("linear", "decode", _sets(lambda: torch.set_default_dtype(torch.bfloat16)), Reason.TAMPERED),
    (
        "linear", "decode",
        _sets(lambda: torch.set_float32_matmul_precision("medium")), Reason.TAMPERED,
    ),
    ("linear", "several_panels", _accumulates_in_float16, Reason.NUMERICS),
    ("kda_prefill", "continued", _keeps_its_state_in_bfloat16, Reason.NUMERICS),
    ("linear", "decode", _errs_on_the_second_call, Reason.UNREPEATABLE),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case", "make", "reason"), CHEATS)
def test_a_cheat_is_stopped_where_it_cheats(
    op: str, case: str, make: Callable[[], Run], reason: Reason
) -> None:
    finding = _examine(op, make(), case)
    assert finding.reason is reason, str(finding)


def test_what_a_candidate_changed_in_the_process_is_put_back() -> None:
    equal, dtype = torch.equal, torch.get_default_dtype()
    for make in (
        _patches(torch, "equal", lambda *a: True),
        _sets(lambda: torch.set_default_dtype(torch.bfloat16)),
    ):
        assert _examine("linear", make(), "decode").reason is Reason.TAMPERED
    assert torch.equal is equal
    assert torch.get_default_dtype() is dtype


# Generated for every contract


def _outputs(op: str, args: dict[str, Any], make: Callable[[Tensor], Tensor]) -> Any:
    """Return made-up outputs of the right shape and dtype; `make` sees what the answer is."""
    contract = CONTRACTS[op]
    honest = _honest(op)(**args)
    values = honest if isinstance(honest, tuple) else () if honest is None else (honest,)
    made = tuple(make(value) for value in values)
    return None if not contract.outputs else made[0] if len(made) == 1 else made


def _null(op: str, make: Callable[[Tensor], Tensor]) -> Run:
    """Return a candidate that computes on copies, so that it mutates nothing, and spoils that."""

    def run(**args: Any) -> Any:
        copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in args.items()}
        return _outputs(op, copies, make)

    return run


def _mean(value: Tensor) -> Tensor:
    return torch.full_like(value, value.double().mean().item() if value.numel() else 0)


NULLS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "the mean": _mean,
}


def _says_something(op: str, case: Case, make: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether the case's answer differs from `make` of it, or its op changes an input."""
    args = case.build(torch.Generator().manual_seed(0))
    truth = reference_values(CONTRACTS[op], args, torch.float64)
    answers = [truth[name] for name in CONTRACTS[op].outputs]
    changes = [
        (truth[name].nan_to_num(), args[name].nan_to_num()) for name in CONTRACTS[op].mutates
    ]
    return any(not torch.equal(a, make(a)) for a in answers) or any(
        not torch.equal(after, before.to(after.dtype)) for after, before in changes
    )


@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize("op", CONTRACTS)
def test_a_null_candidate_fails_wherever_there_is_something_to_say(op: str, null: str) -> None:
    cases = [c for c in CONTRACTS[op].cases if _says_something(op, c, NULLS[null])]
    assert cases, "no case of this contract can tell"
    for case in cases if null == "zeros" else cases[:1]:
        finding = _examine(op, _null(op, NULLS[null]), case.name)
        assert not finding.ok, str(finding)


def _one_wrong_row(value: Tensor) -> Tensor:
    """Return the answer with its last row replaced by the row before it."""
    made = value.clone()
    made[-1] = value[-2]
    return made


@pytest.mark.parametrize("op", [op for op, c in CONTRACTS.items() if c.outputs])
def test_one_wrong_row_fails(op: str) -> None:
    def spoil(value: Tensor) -> Tensor:
        return _one_wrong_row(value) if len(value) > 1 else torch.zeros_like(value)

    seen = 0
    for case in CONTRACTS[op].cases:
        if seen == 4:  # enough to tell, and the recurrences are slow
            break
        args = case.build(torch.Generator().manual_seed(0))
        truth = reference_values(CONTRACTS[op], args, torch.float64)
        if any(len(truth[n]) > 1 and not torch.equal(truth[n][-1], truth[n][-2])
               for n in CONTRACTS[op].outputs):  # fmt: skip
            seen += 1
            assert not _examine(op, _null(op, spoil), case.name).ok, case.name
    assert seen


_ATEN = torch.ops.aten
_PRODUCTS: dict[Any, tuple[int, ...]] = {
    _ATEN.mm.default: (0, 1),
    _ATEN.bmm.default: (0, 1),
    _ATEN.mv.default: (0, 1),
    _ATEN.addmm.default: (1, 2),
    _ATEN.baddbmm.default: (1, 2),
    _ATEN.baddbmm_.default: (1, 2),
    _ATEN.addmm_.default: (1, 2),
    _ATEN.mm.out: (0, 1),
    _ATEN.bmm.out: (0, 1),
    _ATEN.addmm.out: (1, 2),
    _ATEN.baddbmm.out: (1, 2),
    _ATEN._grouped_mm.default: (0, 1),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
}
"""Every product that a kernel calls, and the places of its operands."""


def _as_tf32(x: Tensor) -> Tensor:
    """Round to ten bits of mantissa, to nearest even, as TF32 units do with their operands."""
    if x.dtype is not torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32).view(x.shape)


class _Tf32(TorchDispatchMode):
    """Rounds the operands of products: everywhere, or at the one line of a kernel in `only`."""

    def __init__(self, only: str | None = None) -> None:
        super().__init__()
        self.only, self.sites = only, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            site = _kernel_line()
            self.sites.add(site)
            if self.only in (None, site):
                args = tuple(_as_tf32(a) if i in _PRODUCTS[func] else a for i, a in enumerate(args))
        return func(*args, **(kwargs or {}))


def _kernel_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and "/ops/kernels/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _product_kernels() -> list[Any]:
    here = Facts(device=torch.device("cpu"), dtype=torch.float32)
    without = {  # sums over rows or windows, copies, draws: no dot product reaches a matrix unit
        "rms_norm", "layer_norm", "gated_rms_norm", "swiglu", "short_conv", "short_conv_decode",
        "kda_gate", "kda_decode", "latent_write", "pool_keys_write", "sample",
    }  # fmt: skip
    return [
        pytest.param(k, id=f"{k.op}-{k.name}")
        for k in builtin_kernels()
        if k.op not in without and k.supports(here).ok
    ]


@pytest.mark.parametrize("kernel", _product_kernels())
def test_products_of_tf32_operands_fail(kernel: Kernel) -> None:
    """In float32 every product of every kernel is excited by some case: one line at a time.

    A published fault: TF32 in one product of a chain, invisible where inputs do not excite it.
    """
    contract, sites = CONTRACTS[kernel.op], set[str]()

    def rounded(only: str | None) -> Run:
        def run(**args: Any) -> Any:
            with _Tf32(only) as mode:
                result = kernel.run(**args)
            sites.update(mode.sites)
            return result

        return run

    for case in contract.cases:
        rounded("nowhere")(**case.build(torch.Generator().manual_seed(0)))
    for site in sorted(sites):
        assert any(
            not examine(contract, kernel.name, rounded(site), case).ok for case in contract.cases
        ), f"no case notices TF32 in the product of {site}"
    if not sites:  # an invariant kernel may multiply and add one by one
        assert kernel.invariant


def _long_rows(g: torch.Generator) -> dict[str, Any]:
    width = 16384
    weight = torch.randn(24, width, generator=g) * width**-0.5
    return {"x": torch.randn(4, width, generator=g), "weight": weight, "bias": None}


def test_tf32_fails_on_long_sums_too_where_honest_sums_pass() -> None:
    """Elementwise bounds grow faster than the error of rounded operands: the norm tells."""
    case = Case("long_rows", CaseKind.EXCITATION, _long_rows)

    def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.stack([(x * row).cumsum(-1)[:, -1] for row in weight], -1)

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(_as_tf32(x), _as_tf32(weight))

    for honest in (functional.linear, one_by_one):
        finding = examine(CONTRACTS["linear"], "honest", honest, case)
        assert finding.ok, str(finding)
    finding = examine(CONTRACTS["linear"], "rounded", rounded, case)
    assert finding.reason is Reason.NUMERICS
    assert "root mean square" in finding.detail
