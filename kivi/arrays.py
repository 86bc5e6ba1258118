"""Arrays of other libraries at the door: which library an array belongs to, and views between it and NumPy.

Nothing is imported that the caller has not imported already: an array of torch can only arrive once torch is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from kivi.errors import DeviceError, DtypeError


def kind(x: Any, what: str) -> str:
    """ "numpy", "torch" or "cupy". Raises `DtypeError` for anything else; `what` names the argument."""
    if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
        return "numpy"
    for name, type_name in (("torch", "Tensor"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(x, getattr(module, type_name)):
            return name
    raise DtypeError(f"{what} is a {type(x).__name__}; kivi takes arrays of NumPy, torch and CuPy: convert it first")


def dtype_name(x: Any) -> str:
    """The name of an array's dtype, without the library's prefix."""
    return str(x.dtype).removeprefix("torch.")


def device_of(x: Any, what: str) -> str:
    """ "cpu", or a device such as "cuda:1"."""
    which = kind(x, what)
    if which == "numpy":
        return "cpu"
    return f"cuda:{x.device.id}" if which == "cupy" else str(x.device)


def as_numpy(x: Any, what: str, backend: str) -> np.ndarray:
    """A NumPy view of an array in host memory; no copy. Raises `DeviceError` for an array on a device."""
    which = kind(x, what)
    if which == "numpy":
        return x
    device = device_of(x, what)
    if not device.startswith("cpu"):
        raise DeviceError(f"{what} lives on {device}, but backend {backend!r} runs on the cpu; move it, or choose a backend for {device}")
    if str(x.layout) != "torch.strided":
        raise DtypeError(f"{what} is a {x.layout} tensor; kivi takes dense ones: call to_dense() first")
    x = x.detach().resolve_conj().resolve_neg()
    if dtype_name(x) == "bfloat16":
        return x.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def from_numpy(a: np.ndarray, like: Any) -> Any:
    """The array `a` as an array of the library of `like`, in host memory; no copy."""
    if kind(like, "like") == "numpy":
        return a
    torch = sys.modules["torch"]
    if a.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


def sample(x: Any, old: Any) -> Any:
    """An empty array of the library and device of x, to remember them by; `old` if it is one already."""
    if type(x) is type(old) and device_of(x, "x") == device_of(old, "x"):
        return old
    return x[:0].copy() if kind(x, "x") != "torch" else x[:0].detach().clone()
