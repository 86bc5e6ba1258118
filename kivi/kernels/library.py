"""The kernels of one backend: printed on a miss, read from the disk cache otherwise, and loaded once a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kivi import jit
from kivi.jit import Generated
from kivi.kernels.request import Request, lower

if TYPE_CHECKING:
    from kivi.passes.tensors import Kernel


#: xDSL's builders change a class while they are open, so two threads of a process must not lower at once.
_ONE_AT_A_TIME = threading.RLock()


def _forget() -> None:
    """Another thread's lock does not survive a fork."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True)
class Loaded:
    """A kernel ready to launch; `launch` is what the backend's loader made of it, `source` the file with its text."""

    generated: Generated
    launch: Any
    source: Path


class Library:
    """Kernels by request.

    print_   a lowered `tile` kernel and its request -> `Generated`; may import the compiler
    load     a printed kernel and the file with its source -> what the backend launches
    suffix   of source files

    `hashes`: of the IR of the kernels that are loaded, by name.
    """

    def __init__(
        self,
        backend: str,
        versions: dict[str, str],
        print_: Callable[[Kernel, Request], Generated],
        load: Callable[[Generated, Path], Any],
        suffix: str = ".py",
    ) -> None:
        self.backend, self.versions, self.suffix = backend, versions, suffix
        self._print, self._load = print_, load
        self._loaded: dict[str, Any] = {}  # by text: requests that differ in what does not matter have the same
        self.hashes: dict[str, set[str]] = {}
        self.get = lru_cache(maxsize=None)(self._get)

    def loaded(self) -> dict[str, list[str]]:
        """`hashes` as JSON data, in order."""
        return {name: sorted(hashes) for name, hashes in sorted(self.hashes.items())}

    def printed(self, request: Request) -> tuple[Generated, Path]:
        """The text of a kernel, and its file."""
        key = request.key(self.backend, self.versions)
        return jit.generated(key, lambda: self._print(lower(request), request), self.suffix)

    def _get(self, request: Request) -> Loaded:
        with _ONE_AT_A_TIME:
            generated, source = self.printed(request)
            if generated.source not in self._loaded:
                self._loaded[generated.source] = self._load(generated, source)
                self.hashes.setdefault(generated.name, set()).add(generated.ir_hash)
            return Loaded(generated, self._loaded[generated.source], source)
