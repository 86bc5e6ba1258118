"""The thread shim: CUDA C, unmodified, compiled by a C++ compiler of the system and run on the CPU, thread by thread.

`cuda_shim.h` and `kivi_half.h` stand in for what CUDA brings, `runtime.cpp` runs the threads of a block in a chosen order and reports
barriers and shuffles that not all threads reach. Sums are not contracted, so results are those of the text, to the bit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from kivi.backends.cupy.binaries import cached
from kivi.errors import BackendError, InputError

Order = Literal["ascending", "descending", "random"]

HERE = Path(__file__).parent
# Without optimization: most kernels run a few times, and compiling them takes longer than that.
FLAGS = ("-std=c++14", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
# Nor with libraries: the runtime brings those of C and of mathematics for all, and looking through them would take a third of a build.
NO_LIBRARIES = ("-nodefaultlibs",)
RUNTIME_LIBRARIES = ("-nodefaultlibs", "-lm", "-lc")
SANITIZE = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")
SCALARS = {
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}

_one_block_at_a_time = threading.Lock()


class ShimError(BackendError):
    """A kernel did what would hang or be undefined on a device."""


def compiler() -> list[str] | None:
    """The command of a C++ compiler: `CXX`, one of the system, or that of the package ziglang; None if there is none."""
    named = os.environ.get("CXX")
    if named:
        return named.split()
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


NO_COMPILER = "no C++ compiler (c++, g++, clang++) and no package ziglang; install one of them: pip install ziglang"


@cache
def version(command: tuple[str, ...]) -> str:
    """What a compiler says it is. Raises `BackendError` if it does not run."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise BackendError(f"the C++ compiler {' '.join(command)!r} does not run: {error}; set CXX to one that does") from None


def build(text: str, sanitize: bool = False, libraries: tuple[str, ...] = NO_LIBRARIES) -> Path:
    """A shared library of C++ text, from the cache folder if it was built before. Raises `BackendError` with the compiler's words."""
    command = compiler()
    if command is None:
        raise BackendError(NO_COMPILER)
    flags = (*FLAGS, *(SANITIZE if sanitize else ("-fno-sanitize=all",)))
    libraries = () if sanitize else libraries

    def write(path: Path) -> None:
        full = [*command, *flags, f"-I{HERE}", "-x", "c++", "-", "-o", str(path), *libraries]
        try:
            done = subprocess.run(full, input=text, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BackendError(f"the C++ compiler {' '.join(command)!r} does not run: {error}; set CXX to one that does") from None
        if done.returncode:
            raise BackendError(f"{' '.join(full)} failed on this text:\n{text}\n{done.stderr}")

    return cached(".so", (text, flags, libraries, version(tuple(command)), _headers()), write)


@cache
def _headers() -> str:
    return "".join((HERE / name).read_text("utf-8") for name in ("cuda_shim.h", "kivi_half.h"))


@cache
def _runtime() -> ctypes.CDLL:
    """The library whose functions the kernels call: one a process, loaded for all that come after it."""
    library = ctypes.CDLL(str(build((HERE / "runtime.cpp").read_text("utf-8"), libraries=RUNTIME_LIBRARIES)), mode=ctypes.RTLD_GLOBAL)
    library.shim_launch.restype = ctypes.c_char_p
    return library


class ShimKernel:
    """A kernel of CUDA text, ready to run on NumPy arrays.

    signature: argument name -> type, such as {"x": "*f16", "n": "i32"}. `sanitize`: undefined behaviour ends the process with a message.
    Raises `BackendError` if the text does not compile.
    """

    def __init__(self, name: str, text: str, signature: Mapping[str, str], threads: int, sanitize: bool = False) -> None:
        self.name, self.signature, self.threads = name, dict(signature), threads
        self._runtime = _runtime()
        self._library = ctypes.CDLL(str(build(f'#include "cuda_shim.h"\n{text}\nSHIM_ENTRY({name})\n', sanitize)))

    def __call__(self, grid: Sequence[int], arguments: Sequence[Any], order: Order = "ascending", seed: int = 0) -> None:
        """Run all blocks of a grid. Raises `ShimError` for threads that do not meet."""
        if order not in get_args(Order):
            raise InputError(f"order = {order!r}; threads run in {', '.join(get_args(Order))} order")
        values = [_value(kind, given) for kind, given in zip(self.signature.values(), arguments, strict=True)]
        given = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        x, y, z = (*grid, 1, 1, 1)[:3]
        with _one_block_at_a_time:
            number = get_args(Order).index(order)
            message = self._runtime.shim_launch(self._library.shim_entry, given, x, y, z, self.threads, number, seed)
        if message:
            raise ShimError(f"kernel {self.name!r}: {message.decode()}")


def _value(kind: str, given: Any) -> Any:
    if kind.startswith("*"):
        assert isinstance(given, np.ndarray)
        return ctypes.c_void_p(given.ctypes.data)
    return SCALARS[kind](given)
