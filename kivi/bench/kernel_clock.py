"""How long kernels take within a call, by hooks at the boundary between the host's work and compiled code.

The boundary is the narrowest that a backend has: of a backend that runs kernels on threads of this process, the calls that hand a launch,
or a recorded sequence of launches, to those threads; of others `KernelBackend.launch`, which also packs arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kivi.backend import Backend
from kivi.bench.caches import replaced, timed
from kivi.bench.timing import Clock
from kivi.errors import UnsupportedError

#: Module of a backend's package, and what in it hands work to compiled code.
BOUNDARIES = (("recording", "Recording._run"), ("threads", "run"))


class KernelClock:
    """`seconds[0]`: what kernels took since it was last set to 0. `boundary`: what was hooked."""

    def __init__(self) -> None:
        self.seconds = [0.0]
        self.boundary = ""


@contextmanager
def kernel_clock(backend: Backend, clock: Clock) -> Iterator[KernelClock]:
    """Hooks, for as long as the context lasts. Raises `UnsupportedError` for a backend without generated kernels."""
    package = type(backend).__module__.rpartition(".")[0]
    out, hooked = KernelClock(), []
    with ExitStack() as stack:
        for name, path in BOUNDARIES:
            owner = sys.modules.get(f"{package}.{name}")
            *outer, last = path.split(".")
            for attribute in outer:
                owner = getattr(owner, attribute, None)  # type: ignore[assignment]
            if hasattr(owner, last):
                stack.enter_context(replaced(owner, last, timed(getattr(owner, last), clock, out.seconds)))
                hooked.append(f"{name}.{path}")
        if not hooked:
            kind = type(backend)  # and not the instance, of which a backend may make others
            launch = getattr(kind, "launch", None)
            if launch is None:
                raise UnsupportedError(f"backend {backend.name!r} generates no kernels, so no call can be split into kernels and host")
            stack.enter_context(replaced(kind, "launch", timed(launch, clock, out.seconds)))
            hooked.append("launch")
        out.boundary = ", ".join(hooked)
        yield out
