"""Status codes of the cuDNN names, and the exception that carries one.

One table decides which error of bedstone is which status: a description that makes no sense is
BAD_PARAM, a sound one that nobody computes is NOT_SUPPORTED, memory of another device is
MAPPING_ERROR, a failed kernel is EXECUTION_FAILED.
"""

from __future__ import annotations

from enum import IntEnum

from bedstone.spec.errors import BedstoneError, InvalidDescriptor, NotSupported


class cudnnStatus(IntEnum):
    """What every function answers; 0 is success."""

    CUDNN_STATUS_SUCCESS = 0
    CUDNN_STATUS_NOT_INITIALIZED = 1
    CUDNN_STATUS_ALLOC_FAILED = 2
    CUDNN_STATUS_BAD_PARAM = 3
    CUDNN_STATUS_INTERNAL_ERROR = 4
    CUDNN_STATUS_INVALID_VALUE = 5
    CUDNN_STATUS_ARCH_MISMATCH = 6
    CUDNN_STATUS_MAPPING_ERROR = 7
    CUDNN_STATUS_EXECUTION_FAILED = 8
    CUDNN_STATUS_NOT_SUPPORTED = 9
    CUDNN_STATUS_LICENSE_ERROR = 10


SUCCESS = cudnnStatus.CUDNN_STATUS_SUCCESS
UNKNOWN_STATUS = "unknown status"


class CudnnError(BedstoneError, RuntimeError):
    """A function refused. `status` is its code, `function` its name, `reason` says why in words."""

    def __init__(self, status: int, function: str = "", reason: str = "") -> None:
        words = (function, error_string(status), reason)
        super().__init__(": ".join(word for word in words if word))
        self.status = cudnnStatus(status) if status in _CODES else int(status)
        self.function = function
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (int(self.status), self.function, self.reason)


_CODES = frozenset(int(status) for status in cudnnStatus)


class Refusal(BedstoneError):
    """Raised inside, where no error of bedstone's own names the status that is meant."""

    def __init__(self, status: cudnnStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def not_supported(argument: str, value: object, expected: str) -> Refusal:
    """For a value that the interface knows and nobody computes."""
    text = f"{argument}: got {value!r}, expected {expected}"
    return Refusal(cudnnStatus.CUDNN_STATUS_NOT_SUPPORTED, text)


def mapping_error(argument: str, value: object, expected: str) -> Refusal:
    """For memory that the handle's device does not reach."""
    text = f"{argument}: got {value}, expected {expected}"
    return Refusal(cudnnStatus.CUDNN_STATUS_MAPPING_ERROR, text)


def error_string(status: int) -> str:
    """The name of a status code."""
    return cudnnStatus(status).name if status in _CODES else UNKNOWN_STATUS


def status_of(error: BaseException) -> cudnnStatus:
    """The status that stands for an exception."""
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, CudnnError):
        return cudnnStatus(error.status)
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status
    return cudnnStatus.CUDNN_STATUS_INTERNAL_ERROR


# The first kind that fits counts; what is left of bedstone's errors comes from a device's driver.
_STATUSES: dict[type[BaseException], cudnnStatus] = {
    InvalidDescriptor: cudnnStatus.CUDNN_STATUS_BAD_PARAM,
    NotSupported: cudnnStatus.CUDNN_STATUS_NOT_SUPPORTED,
    BedstoneError: cudnnStatus.CUDNN_STATUS_EXECUTION_FAILED,
    MemoryError: cudnnStatus.CUDNN_STATUS_ALLOC_FAILED,
}
EXPECTED_ERRORS = tuple(_STATUSES)


def cudnnCheckStatus(status: int) -> None:
    """Raises CudnnError unless the status is 0."""
    if status != SUCCESS:
        raise CudnnError(status)
