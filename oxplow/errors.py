"""The exception tree.

Owns every exception type that Oxplow raises on purpose. It must not know any other module.
Invariant: a message says what happened, what was got, what was wanted and where, in that order.

    OxplowError                 catch this to catch all of them
    |-- ConfigError             a setting, file or flag is wrong; nothing was started
    |-- ContractError           tensors given to an op do not fit its contract
    |-- KernelUnavailable       no registered kernel can serve an op here; carries each rejection
    |-- CapacityError           blocks, slots or memory ran out; retry later or ask for less
    |-- RequestError            the client's request is wrong; the text is shown to the client
    |-- WeightError             a checkpoint lacks, repeats or misshapes a tensor
    `-- TransferError           a hand-over between workers failed, expired or arrived damaged
"""

from collections.abc import Sequence

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContractError",
    "KernelUnavailable",
    "OxplowError",
    "RequestError",
    "TransferError",
    "WeightError",
]


class OxplowError(Exception):
    """Report a failure with its parts kept apart, so that callers need not parse the message.

    `what` is one sentence without a final dot; `got`, `wanted` and `where` are optional and become
    "; got ...", "; wanted ..." and " (at ...)". An absent part is None; every other value is shown.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        wanted: object = None,
        where: object = None,
    ) -> None:
        self.what = what
        self.got = got
        self.wanted = wanted
        self.where = where
        super().__init__(what)

    def __str__(self) -> str:
        """Return the message: what, got, wanted, where."""
        text = self.what
        if self.got is not None:
            text += f"; got {self.got}"
        if self.wanted is not None:
            text += f"; wanted {self.wanted}"
        if self.where is not None:
            text += f" (at {self.where})"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        """Keep every part when the error crosses a process boundary."""
        return (_restore, (type(self), dict(self.__dict__)))


class ConfigError(OxplowError):
    """Say that a setting, a configuration file or a flag is wrong."""


class ContractError(OxplowError):
    """Say that a call does not fit its op's contract: shape, dtype, layout, device or alias."""


class KernelUnavailable(OxplowError):  # noqa: N818 - the name that the op table documents
    """Say that no kernel can serve `op`, and why each candidate was refused.

    `rejections` holds (kernel, reason) pairs in the order in which they were asked.
    """

    def __init__(
        self,
        op: str,
        rejections: Sequence[tuple[str, str]] = (),
        *,
        where: object = None,
    ) -> None:
        self.op = op
        self.rejections: tuple[tuple[str, str], ...] = tuple((k, r) for k, r in rejections)
        told = "; ".join(f"{kernel}: {reason}" for kernel, reason in self.rejections)
        super().__init__(
            f"no kernel can serve op {op!r}",
            got=told or "no registered kernel",
            wanted="one that supports the case",
            where=where,
        )


class CapacityError(OxplowError):
    """Say that blocks, slots or memory do not suffice; the caller may retry or ask for less."""


class RequestError(OxplowError):
    """Say that a client's request is wrong; the message reaches the client as it is.

    `param` names the field at fault, `code` is a short word that programs may compare.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        wanted: object = None,
        where: object = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(what, got=got, wanted=wanted, where=where)
        self.param = param
        self.code = code


class WeightError(OxplowError):
    """Say that a checkpoint lacks, repeats, misshapes or wrongly encodes a tensor."""


class TransferError(OxplowError):
    """Say that a hand-over failed, expired or did not match its manifest."""


def _restore(kind: type[OxplowError], parts: dict[str, object]) -> OxplowError:
    """Rebuild an error from its parts without running the subclass's constructor."""
    error = kind.__new__(kind)
    error.__dict__.update(parts)
    error.args = (parts["what"],)
    return error
