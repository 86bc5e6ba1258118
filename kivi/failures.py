"""What went wrong below, in kivi's own errors: out of memory, a lost device, or whatever else a backend or its vendor's package raises.

Vendors' exceptions are told by their names and words, since nothing here may import their packages.
"""

from __future__ import annotations

from types import TracebackType

from kivi.backend import Backend
from kivi.errors import BackendError, CapacityError, DeviceLostError, KiviError
from kivi.subnormals import Kept

#: Names of exceptions that mean that an allocation failed: torch's, CuPy's; and words of drivers for the same.
MEMORY_TYPES = frozenset({"MemoryError", "OutOfMemoryError"})
MEMORY_WORDS = ("out of memory", "out_of_memory", "cudaerrormemoryallocation", "hiperroroutofmemory")
#: Words of errors after which a device, or this process's hold on it, is of no more use ("sticky" ones of the CUDA driver; HIP's alike).
LOST_WORDS = (
    "illegal memory access",
    "illegaladdress",
    "illegal_address",
    "illegal instruction",
    "illegal_instruction",
    "misaligned address",
    "misaligned_address",
    "unspecified launch failure",
    "launchfailure",
    "launch_failed",
    "launch timed out",
    "launchtimeout",
    "launch_timeout",
    "device-side assert",
    "errorassert",
    "error_assert",
    "uncorrectable",
    "device is lost",
    "device_lost",
    "devicesunavailable",
    "fallen off the bus",
    "no longer available",
)


class Running:
    """A context in which a backend works: errors from below come out of kivi's tree and name it, and subnormal numbers are kept. `what`:
    what is being done."""

    def __init__(self, backend: Backend, what: str) -> None:
        self.backend, self.what, self._kept = backend, what, Kept()

    def __enter__(self) -> None:
        self._kept.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kept.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            out = translated(error, self.backend, self.what)
            if out is not error:
                raise out from out.__cause__


def translated(error: Exception, backend: Backend, what: str) -> Exception:
    """The error to raise in place of one from below: one of kivi's own as it is, unless it only wraps a vendor's."""
    wraps = type(error) is BackendError and isinstance(error.__cause__, Exception)
    if isinstance(error, KiviError) and not wraps:
        return error
    cause = error.__cause__ if wraps and isinstance(error.__cause__, Exception) else error
    kind = kind_of(cause)
    if wraps and kind is BackendError:
        return error
    verb = {CapacityError: "has no memory for", DeviceLostError: "lost its device in"}.get(kind, "failed in")
    where = f"backend {backend.name!r} (mode {backend.mode}, {backend.device}) {verb} {what}"
    text = str(error) if wraps else f"{type(error).__name__}: {error}"
    out = kind(f"{where}: {text}; {_remedy(kind, what)}")
    out.__cause__ = cause
    return out


def kind_of(error: BaseException) -> type[KiviError]:
    """`CapacityError`, `DeviceLostError`, or `BackendError` for all else."""
    text = str(error).lower()
    if any(t.__name__ in MEMORY_TYPES for t in type(error).__mro__) or any(word in text for word in MEMORY_WORDS):
        return CapacityError
    return DeviceLostError if any(word in text for word in LOST_WORDS) else BackendError


#: What reads all that a cache holds: what cannot be done any more on a lost device.
READING = ("to", "save", "fork", "deepcopy")


def _remedy(kind: type[KiviError], what: str) -> str:
    if kind is CapacityError:
        return "the cache is as it was: free memory, use a smaller batch, or move it with cache.to(...)"
    if kind is DeviceLostError and what in READING:
        return "what the cache holds on this device cannot be read any more: go on in a new process, from a file that cache.save wrote"
    if kind is DeviceLostError:
        return (
            "the cache is as it was as far as its device can still be read: cache.to(...) moves it, or says that it cannot; a new process "
            "gets the device back"
        )
    return "the cache is as it was"
