"""The rewrites of `tile` kernels by name, and their order: data of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kivi.ir.xdsl import ModuleOp
from kivi.passes.clean import clean, sweep
from kivi.passes.contract import contract
from kivi.passes.fold_scale import fold_scale
from kivi.passes.join_sums import join_sums
from kivi.passes.split_kv import RewriteError, split_kv
from kivi.passes.tensors import Kernel
from kivi.passes.unpack_in_place import unpack_in_place


def _of_module(rewrite: Callable[[ModuleOp], int]) -> Callable[[Kernel], Kernel]:
    def apply(kernel: Kernel) -> Kernel:
        rewrite(kernel.module)
        return kernel

    return apply


REWRITES: dict[str, Callable[[Kernel], Kernel]] = {
    "split_kv": split_kv,
    "fold_scale": _of_module(fold_scale),
    "unpack_in_place": _of_module(unpack_in_place),
    "join_sums": _of_module(join_sums),
    "contract": _of_module(contract),
}


def rewrite(kernel: Kernel, names: Sequence[str]) -> Kernel:
    """The kernel after the named rewrites, in order; the kernel given is used up. Raises `RewriteError` for an unknown name."""
    unknown = [name for name in names if name not in REWRITES]
    if unknown:
        raise RewriteError(f"there is no rewrite {unknown[0]!r}; there are {', '.join(REWRITES)}")
    clean(kernel.module)
    for name in names:
        kernel = REWRITES[name](kernel)
        sweep(kernel.module)  # what was replaced must not count as a use
    clean(kernel.module)
    return kernel
