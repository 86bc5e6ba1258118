"""A simulator for Numba CUDA kernels: their unmodified text, every thread a greenlet, between barriers in a chosen order.

Numba's own simulator has no shuffles, knows nothing of libdevice and takes an operating system's thread for each of a kernel; and whether
it is on is fixed when `numba.cuda` is imported. This one takes the place of the modules that a text imports, so Numba need not be there.
Numbers are those of a device: integers are Python's, cut to their width by the casts that the text is full of; float32 is NumPy's, with one
rounding an operation; half is float32 between memory and a rounding. Arrays of a block start empty, so what was never written shows.
"""

from __future__ import annotations

import ast
import builtins
import contextvars
import ctypes
import math
import operator
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import greenlet  # type: ignore[import-untyped]
import numpy as np

from kivi.errors import BackendError, InputError

Order = Literal["ascending", "descending", "random"]
WARP = 32


class SimulatorError(BackendError):
    """A kernel did what would hang or be undefined on a device."""


# -- types and libdevice ----------------------------------------------------------------------------------------------


def _unsigned(bits: int) -> Callable[[int], int]:
    mask = (1 << bits) - 1
    return lambda x: x & mask


def _signed(bits: int) -> Callable[[int], int]:
    mask, top = (1 << bits) - 1, 1 << (bits - 1)
    return lambda x: ((x & mask) ^ top) - top


def _int64(x: Any) -> int:
    return ((int(x) & 0xFFFFFFFFFFFFFFFF) ^ 0x8000000000000000) - 0x8000000000000000


_SMALL = [np.float32(i) for i in range(256)]  # codes


def _float32(x: Any) -> np.float32:
    if type(x) is np.float32:
        return x
    if type(x) is int and 0 <= x < 256:
        return _SMALL[x]
    return np.float32(x)


def _float16(x: Any) -> np.float32:
    return np.float32(np.float16(x))


_cell = np.zeros(1, np.float32)
_cell_bits = memoryview(_cell.view(np.int32))  # type: ignore[arg-type]


def _float_as_int(x: np.float32) -> int:
    _cell[0] = x
    return _cell_bits[0]


def _int_as_float(x: int) -> np.float32:
    _cell_bits[0] = x
    return _cell[0]


def _fmax(a: Any, b: Any) -> Any:
    return a if a >= b or b != b else b


def _fmin(a: Any, b: Any) -> Any:
    return a if a <= b or b != b else b


def _fma(a: Any, b: Any, c: Any) -> np.float32:
    """The product is exact in float64; the sum rounds there first, which the sums that use it may."""
    return np.float32(float(a) * float(b) + float(c))


LIBDEVICE = SimpleNamespace(
    fadd_rn=operator.add,
    fsub_rn=operator.sub,
    fmul_rn=operator.mul,
    fdiv_rn=operator.truediv,
    fmaxf=_fmax,
    fminf=_fmin,
    dadd_rn=operator.add,
    dmul_rn=operator.mul,
    ddiv_rn=operator.truediv,
    expf=np.exp,
    exp2f=np.exp2,
    log2f=np.log2,
    fabsf=abs,
    rintf=np.rint,
    fmaf_rn=_fma,
    float_as_int=_float_as_int,
    int_as_float=_int_as_float,
)
TYPES = SimpleNamespace(
    boolean=bool,
    float16=_float16,
    float32=_float32,
    float64=np.float64,
    int64=_int64,
    **{f"uint{bits}": _unsigned(bits) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": _signed(bits) for bits in (8, 16, 32)},
)


class Inline(ast.NodeTransformer):
    """Calls that Python has operators for, as those: a call costs more than what it does. The functions above say the same."""

    WIDTHS: ClassVar = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64, "int8": 8, "int16": 16, "int32": 32}
    OPERATORS: ClassVar = {"fadd_rn": ast.Add, "fsub_rn": ast.Sub, "fmul_rn": ast.Mult, "fdiv_rn": ast.Div}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in self.OPERATORS:
            return ast.BinOp(node.args[0], self.OPERATORS[function.attr](), node.args[1])
        name = function.id if isinstance(function, ast.Name) else ""
        if name not in self.WIDTHS:
            return node
        bits = self.WIDTHS[name]
        cut = ast.BinOp(node.args[0], ast.BitAnd(), ast.Constant((1 << bits) - 1))
        if name.startswith("u"):
            return cut
        top = ast.Constant(1 << (bits - 1))
        return ast.BinOp(ast.BinOp(cut, ast.BitXor(), top), ast.Sub(), top)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(address: int, size: int) -> np.ndarray:
    """Bytes of this process as an array; whoever owns them keeps them alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Half:
    """Half precision in memory: numbers come as float32."""

    TABLE = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

    def __init__(self, words: memoryview) -> None:
        self.words = words

    def __getitem__(self, i: int) -> np.float32:
        return self.TABLE[self.words[i]]

    def __setitem__(self, i: int, x: np.float32) -> None:
        self.words[i] = int(np.float16(x).view(np.uint16))


def pointer(a: np.ndarray, kind: str) -> Any:
    """What a kernel indexes where it was given `a`, whose first element is element 0. Strides of `a` are not negative."""
    size = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize if a.size else 0
    if not size:
        return ()
    flat = memory(a.ctypes.data, size)
    if kind in ("f32", "f64"):
        return flat.view(f"float{kind[1:]}")
    words = memoryview(flat.view(f"uint{kind[1:]}"))  # type: ignore[arg-type]  # its elements are numbers of Python
    return Half(words) if kind == "f16" else words


# -- threads ----------------------------------------------------------------------------------------------------------


class Block:
    """What the threads of one block share."""

    def __init__(self) -> None:
        self.threadIdx = SimpleNamespace(x=0)
        self.blockIdx = SimpleNamespace(x=0, y=0, z=0)
        self.shared = SimpleNamespace(array=self._shared)
        self.local = SimpleNamespace(array=lambda count, kind: [None] * count)
        self.arrays: list[list[Any]] = []
        self.asked: list[int] = []  # arrays that each thread has asked for

    def start(self, threads: int, place: tuple[int, int, int]) -> None:
        self.arrays, self.asked = [], [0] * threads
        self.blockIdx.x, self.blockIdx.y, self.blockIdx.z = place

    def _shared(self, count: int, kind: Any) -> list[Any]:
        """The next array of this thread: all threads ask in one order."""
        number = self.asked[self.threadIdx.x]
        self.asked[self.threadIdx.x] += 1
        if number == len(self.arrays):
            self.arrays.append([None] * count)
        return self.arrays[number]

    def wait(self, *what: Any) -> Any:
        """Hand over to the scheduler; returns what it gives back."""
        return greenlet.getcurrent().parent.switch(what)  # type: ignore[union-attr]

    def syncthreads(self) -> None:
        self.wait("barrier")

    def shfl_xor_sync(self, mask: int, value: Any, offset: int) -> Any:
        return self.wait("shuffle", mask, value, lambda lane: lane ^ offset)

    def shfl_down_sync(self, mask: int, value: Any, offset: int) -> Any:
        return self.wait("shuffle", mask, value, lambda lane: lane + offset if lane + offset < WARP else lane)


_one_at_a_time = threading.Lock()


class Simulated:
    """A kernel of Numba CUDA text, ready to run on NumPy arrays.

    signature: argument name -> type, such as {"x": "*f16", "n": "i32"}.
    """

    def __init__(self, name: str, text: str, signature: Mapping[str, str], threads: int, filename: str = "<kernel>") -> None:
        self.name, self.signature, self.threads = name, dict(signature), threads
        self.cuda = Block()
        modules = {
            "math": math,
            "numba": SimpleNamespace(**vars(TYPES), cuda=self.cuda),
            "numba.cuda": SimpleNamespace(libdevice=LIBDEVICE),
            "numba.cuda.types": TYPES,
        }
        namespace: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": lambda module, *_: modules[module]}}
        tree = ast.fix_missing_locations(Inline().visit(ast.parse(text, filename)))
        exec(compile(tree, filename, "exec"), namespace)
        self.function = namespace[name]

    def __call__(self, grid: Sequence[int], arguments: Sequence[Any], order: Order = "ascending", seed: int = 0) -> None:
        """Run all blocks of a grid. Raises `SimulatorError` for threads that do not meet, and for accesses outside the arguments."""
        if order not in get_args(Order):
            raise InputError(f"order = {order!r}; threads run in {', '.join(get_args(Order))} order")
        given = [_value(kind, a) for kind, a in zip(self.signature.values(), arguments, strict=True)]
        rng = random.Random(seed)
        x, y, z = (*grid, 1, 1, 1)[:3]
        with _one_at_a_time, np.errstate(all="ignore"):
            for place in ((i, j, k) for i in range(x) for j in range(y) for k in range(z)):
                self.cuda.start(self.threads, place)
                try:
                    self._block(given, order, rng)
                except (IndexError, TypeError) as error:
                    raise SimulatorError(f"kernel {self.name!r}, block {place}: outside its arrays, or never written: {error}") from error

    def _block(self, given: list[Any], order: Order, rng: random.Random) -> None:
        threads = [greenlet.greenlet(self.function) for _ in range(self.threads)]
        for thread in threads:
            thread.gr_context = contextvars.copy_context()  # which holds how NumPy takes an overflow
        values: list[Any] = [None] * self.threads
        started = False
        while True:
            turn = list(range(self.threads))
            if order == "descending":
                turn.reverse()
            elif order == "random":
                rng.shuffle(turn)
            at: list[Any] = [None] * self.threads
            for i in turn:
                thread = threads[i]
                self.cuda.threadIdx.x = i
                at[i] = thread.switch(values[i]) if started else thread.switch(*given)
                if thread.dead:
                    at[i] = None
            started = True
            if all(wait is None for wait in at):
                return
            values = self._meet(at)

    def _meet(self, at: list[Any]) -> list[Any]:
        """All threads wait or are done: what each gets back."""
        kinds = [wait and wait[0] for wait in at]
        values: list[Any] = [None] * self.threads
        if "barrier" in kinds:
            self._together(kinds, 0, self.threads, "barrier")
            return values
        for first in range(0, self.threads, WARP):
            if any(kinds[first : first + WARP]):
                self._together(kinds, first, first + WARP, "shuffle")
                for i in range(first, first + WARP):
                    _, mask, _, source = at[i]
                    if mask != 0xFFFFFFFF:
                        raise SimulatorError(f"kernel {self.name!r}: a shuffle of all threads of a warp has the mask {mask:#x}")
                    values[i] = at[first + source(i - first)][2]
        return values

    def _together(self, kinds: list[Any], first: int, last: int, what: str) -> None:
        late = [i for i in range(first, last) if kinds[i] != what]
        if late:
            raise SimulatorError(f"kernel {self.name!r}: thread {late[0]} does not reach the {what} at which others wait")


def _value(kind: str, given: Any) -> Any:
    if kind.startswith("*"):
        return pointer(given, kind[1:])
    return np.float32(given) if kind == "f32" else int(given) & ((1 << int(kind[1:])) - 1)
