"""The exceptions of kivi.

Every error raised on purpose derives from `KiviError` and, where one fits, from the built-in that a caller would expect.

    KiviError
    |-- SpecError (ValueError)                 a spec breaks a rule of spec/SPEC.md
    |   `-- NotImplementedYetError (NotImplementedError)   a valid spec that this release cannot serve
    |-- InputError (ValueError)                an argument breaks a rule; nothing was changed
    |   |-- ShapeError
    |   |-- DtypeError (TypeError)
    |   |-- NonFiniteError                     NaN or Inf under nonfinite = "reject"
    |   `-- MetadataOverflowError (OverflowError)   scale or origin exceeds the metadata dtype
    |-- StateError (RuntimeError)              the cache is not in a state that allows the call
    |   |-- PendingTokensError                 commit or roll back first
    |   `-- CapacityError                      max_tokens, the page pool or the device's memory is exhausted
    |-- SaveFileError (ValueError)             a save file is damaged, or belongs to another spec
    |-- ConfigError (ValueError)               a configuration file or an environment variable says what cannot be
    |-- BackendError (RuntimeError)            a backend failed; the message names it
    |   |-- UnknownBackendError (LookupError)
    |   |-- BackendUnavailableError            package, driver or device missing
    |   |-- UnsupportedError                   no backend, or not this one, can serve the request
    |   |-- DeviceError                        an array lives on a device that the backend cannot read
    |   `-- DeviceLostError                    a device stopped working; what it held may be unreadable
    `-- IntegrationError (RuntimeError)        a model, mask or option of another library that kivi cannot serve

A message names the value, the rule it breaks and what to do about it.
"""

from __future__ import annotations

from typing import Any


class KiviError(Exception):
    """Base of all errors that kivi raises on purpose."""


class SpecError(KiviError, ValueError):
    """A spec breaks a rule of spec/SPEC.md."""


class NotImplementedYetError(SpecError, NotImplementedError):
    """The spec is valid, but this release does not implement a field's value."""


class InputError(KiviError, ValueError):
    """An argument breaks a rule. State is as it was before the call."""


class ShapeError(InputError):
    """An array has the wrong shape."""


class DtypeError(InputError, TypeError):
    """An array or argument has the wrong dtype or type."""


class NonFiniteError(InputError):
    """NaN or Inf arrived under `nonfinite = "reject"`. Names tensor, request, head, token and channel."""


class MetadataOverflowError(InputError, OverflowError):
    """A scale or origin does not fit the metadata dtype under `overflow = "reject"`."""


class StateError(KiviError, RuntimeError):
    """The cache is not in a state that allows the call. State is as it was."""


class PendingTokensError(StateError):
    """The call needs a cache without pending tokens: commit or roll back first."""


class CapacityError(StateError):
    """`max_tokens`, the page pool or the memory of the device is exhausted."""


class SaveFileError(KiviError, ValueError):
    """A save file is damaged, of another version, or holds a cache of another spec."""


class ConfigError(KiviError, ValueError):
    """A configuration file or an environment variable says what cannot be."""


class BackendError(KiviError, RuntimeError):
    """A backend failed. The message names backend and mode."""


class UnknownBackendError(BackendError, LookupError):
    """No installed backend has this name."""


class BackendUnavailableError(BackendError):
    """The backend exists but cannot run here; the message says what is missing."""


class UnsupportedError(BackendError):
    """The request is outside a backend's declared capabilities. From a selection, `rejected` holds every backend with its reason."""

    rejected: tuple[Any, ...] = ()


class DeviceError(BackendError):
    """An array lives on a device that the backend cannot read."""


class DeviceLostError(BackendError):
    """A device stopped working in the middle of something. The cache is as it was, if its memory can still be read."""


class IntegrationError(KiviError, RuntimeError):
    """Something of another library (a layer, a mask, an option) that kivi cannot serve."""


class UnknownOperationError(KiviError, NotImplementedError):
    """An operation of the IR that an interpreter, a lowering or an emitter has no rule for."""
