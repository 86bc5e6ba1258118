"""A lowered `tile` kernel as CUDA C: pure text, with no decision about what runs it."""

from __future__ import annotations

import hashlib

from kivi.emit import c
from kivi.jit import Generated
from kivi.kernels.request import Request
from kivi.passes.tensors import Kernel
from kivi.passes.tile_to_simt import lower

THREADS = 128  # of a block, for kernels without a schedule


def printed(kernel: Kernel, request: Request) -> Generated:
    """The kernel for blocks of as many threads as its schedule says."""
    schedule = request.option("schedule")
    threads = schedule.threads if schedule else THREADS
    module = lower(kernel.module, threads, verify=False)
    text = c.emit(module, c.CUDA)
    digest = hashlib.sha256(text.encode()).hexdigest()  # a statement an operation: the text is the IR, and printed already
    return Generated(kernel.name, text, c.signature(module, kernel.name), kernel.grid, digest, {"threads": threads})
