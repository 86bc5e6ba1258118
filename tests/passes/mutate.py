"""Deliberately wrong passes: one piece of a pass's source replaced, for the time of a test.

The functions of the module get the code of the mutated source, so every name under which they were imported is the mutant.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """`module` with `old`, which its source holds exactly once, replaced by `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} holds {old!r} {source.count(old)} times; a mutant names what it changes once"
    wrong = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"<{module.__name__} mutated>", "exec"), wrong.__dict__)
    pairs = [(mine, other) for mine, other in _functions(module, wrong) if mine.__code__ != other.__code__]
    assert pairs, "the mutant changes no function"
    before = [mine.__code__ for mine, _ in pairs]
    try:
        for mine, other in pairs:
            mine.__code__ = other.__code__
        yield
    finally:
        for (mine, _), code in zip(pairs, before, strict=True):
            mine.__code__ = code


def _functions(module: ModuleType, other: ModuleType) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Functions and methods of a module beside those of the same name of another."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType):
            yield value, vars(other)[name]
        elif isinstance(value, type):
            for label, member in vars(value).items():
                mine, theirs = (_plain(x) for x in (member, vars(vars(other)[name]).get(label)))
                if isinstance(mine, FunctionType) and isinstance(theirs, FunctionType) and mine.__qualname__.startswith(name):
                    yield mine, theirs


def _plain(member: object) -> object:
    """The function behind a method, a property or a cached property."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, None) or member
    return member
