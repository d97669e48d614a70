"""The exception tree: its shape, its messages, and errors that cross a process boundary."""

import inspect
import pickle

import pytest

import oxplow.errors
from oxplow.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    KernelUnavailable,
    OxplowError,
    RequestError,
    TransferError,
    WeightError,
)

KINDS = (CapacityError, ConfigError, ContractError, RequestError, TransferError, WeightError)


@pytest.mark.parametrize("kind", [*KINDS, KernelUnavailable])
def test_every_error_is_caught_as_oxplow_error(kind: type[OxplowError]) -> None:
    with pytest.raises(OxplowError):
        raise kind("x")


def test_tree_in_the_docstring_names_every_exception_and_no_other() -> None:
    drawn = {word for word in (oxplow.errors.__doc__ or "").split() if word[0].isupper()}
    defined = {n for n, v in vars(oxplow.errors).items() if inspect.isclass(v) and n in KIND_NAMES}
    assert drawn & KIND_NAMES == defined == set(oxplow.errors.__all__)


KIND_NAMES = {kind.__name__ for kind in (OxplowError, KernelUnavailable, *KINDS)}


def test_message_says_what_got_wanted_and_where_in_this_order() -> None:
    error = WeightError("shape differs", got=(2, 3), wanted=(3, 2), where="layers.0.q_proj")
    assert str(error) == "shape differs; got (2, 3); wanted (3, 2) (at layers.0.q_proj)"


@pytest.mark.parametrize("empty", [0, "", False, ()])
def test_falsy_values_are_shown(empty: object) -> None:
    assert str(ConfigError("x", got=empty)) == f"x; got {empty}"


def test_absent_parts_are_left_out() -> None:
    assert str(CapacityError("no block is free")) == "no block is free"


def test_kernel_unavailable_carries_each_rejection_in_order() -> None:
    error = KernelUnavailable("kda_decode", [["triton", "no CUDA"], ("vendor", "K != 128")])
    assert error.rejections == (("triton", "no CUDA"), ("vendor", "K != 128"))
    assert "'kda_decode'; got triton: no CUDA; vendor: K != 128" in str(error)


def test_kernel_unavailable_without_candidates_says_so() -> None:
    assert "got no registered kernel" in str(KernelUnavailable("kda_decode"))


@pytest.mark.parametrize(
    "error",
    [
        OxplowError("a", got=1, wanted=2, where="b"),
        KernelUnavailable("op", [("k", "r")], where="cpu"),
        RequestError("bad", got=3, param="top_p", code="range"),
    ],
)
def test_error_survives_pickling_with_every_part(error: OxplowError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.args == error.args


def test_request_error_names_the_field_at_fault() -> None:
    error = RequestError("out of range", got=3, wanted="0 to 1", param="top_p", code="range")
    assert (error.param, error.code) == ("top_p", "range")
