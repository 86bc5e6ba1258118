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
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args

import greenlet  # type: ignore[import-untyped]
import numpy as np

from kivi.errors import BackendError, InputError

Order = Literal["ascending", "descending", "random"]
WARP = 32
WIDE = 16  # bytes of a run


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
    """Calls that Python has operators for, as those: a call costs more than what it does. The functions above say the same.

    A cast to unsigned integers is left out where the number is known to fit, one to float32 where it is one: from the types that the text
    casts to, and from the types of what the kernel is given. Of a block's arrays nothing is known, so that a cast still shows what was
    never written. Names of constants become those.
    """

    UNSIGNED: ClassVar = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
    SIGNED: ClassVar = {"int8": 8, "int16": 16, "int32": 32}
    OPERATORS: ClassVar = {"fadd_rn": ast.Add, "fsub_rn": ast.Sub, "fmul_rn": ast.Mult, "fdiv_rn": ast.Div}

    def __init__(self, text: str, signature: Mapping[str, str]) -> None:
        self.assigned = Counter(re.findall(r"^ *(\w+) = ", text, re.MULTILINE))
        self.kinds = {name: _kind(kind) for name, kind in signature.items() if not kind.startswith("*")}
        self.elements = {name: _kind(kind[1:]) for name, kind in signature.items() if kind.startswith("*")}
        self.bits: dict[str, int] = {}
        self.constants: dict[str, int] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.constants.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if value is None else _at(node, ast.Constant(value))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        [target], kind = node.targets, self._kind(node.value)
        node.value = self.visit(node.value)
        if isinstance(target, ast.Name):
            self.kinds[target.id] = kind
            if kind > 0 and self.assigned[target.id] == 1:  # not carried by a loop
                self.bits[target.id] = min(kind, self._bits(node.value) or kind)
                if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
                    self.constants[target.id] = node.value.value
        else:
            node.targets = [self.visit(target)]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Signed numbers are in the order of what they are with the sign turned."""
        [right] = node.comparators
        names = {side.func.id for side in (node.left, right) if isinstance(side, ast.Call) and isinstance(side.func, ast.Name)}
        if isinstance(node.left, ast.Call) and isinstance(right, ast.Call) and len(names) == 1 and names <= self.SIGNED.keys():
            width = self.SIGNED[names.pop()]
            sides = [self._masked(side, self.visit(side.args[0]), width) for side in (node.left, right)]
            node.left, node.comparators[0] = (_operate(side, ast.BitXor(), 1 << (width - 1)) for side in sides)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        node.args = [self.visit(argument) for argument in node.args]
        if isinstance(function, ast.Attribute) and function.attr in self.OPERATORS:
            return _at(node, ast.BinOp(node.args[0], self.OPERATORS[function.attr](), node.args[1]))
        name = function.id if isinstance(function, ast.Name) else ""
        if name in self.UNSIGNED:
            return self._masked(node, node.args[0], self.UNSIGNED[name])
        if name in self.SIGNED:
            top = 1 << (self.SIGNED[name] - 1)
            return _operate(_operate(self._masked(node, node.args[0], self.SIGNED[name]), ast.BitXor(), top), ast.Sub(), top)
        if name == "float32" and 0 < self._bits(node.args[0]) <= 8:
            return _at(node, ast.Subscript(_at(node, ast.Name("_SMALL", ast.Load())), node.args[0], ast.Load()))
        return node.args[0] if name == "float32" and self._kind(node.args[0]) == FLOAT else node

    def _masked(self, node: ast.expr, x: ast.expr, width: int) -> ast.expr:
        """The low bits of `x`."""
        if isinstance(x, ast.Constant) and type(x.value) is int:
            return _at(node, ast.Constant(x.value & ((1 << width) - 1)))
        return x if 0 < self._bits(x) <= width else _operate(_at(node, x), ast.BitAnd(), (1 << width) - 1)

    def _kind(self, x: ast.expr) -> int:
        """The type of a value: the bits of an unsigned integer, or `FLOAT`; 0 if nothing is known."""
        if isinstance(x, ast.Name):
            return self.kinds.get(x.id, 0)
        if isinstance(x, ast.Subscript):
            return self.elements.get(x.value.id, 0) if isinstance(x.value, ast.Name) else 0
        if isinstance(x, ast.IfExp):
            return self._kind(x.body)
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Name):
            return FLOAT if x.func.id in ("float32", "float16") else self.UNSIGNED.get(x.func.id, 0)
        return 0

    def _bits(self, x: ast.expr) -> int:
        """The most bits that a number which is not negative has; 0 if nothing is known."""
        if isinstance(x, ast.Constant):
            return max(1, x.value.bit_length()) if type(x.value) is int and x.value >= 0 else 0
        if isinstance(x, ast.BinOp):
            left, right = self._bits(x.left), self._bits(x.right)
            if isinstance(x.op, ast.BitAnd):
                return min(left, right) or left or right  # one of them is enough
            rule = BITS.get(type(x.op))
            return rule(left, right) if rule and left and right else 0
        return self.bits[x.id] if isinstance(x, ast.Name) and x.id in self.bits else max(0, self._kind(x))


FLOAT = -1
BITS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: max(a, b) + 1,
    ast.Mult: operator.add,
    ast.FloorDiv: lambda a, b: a,
    ast.RShift: lambda a, b: a,
    ast.Mod: lambda a, b: b,
    ast.BitOr: max,
    ast.BitXor: max,
}


def _kind(argument: str) -> int:
    return FLOAT if argument in ("f16", "f32") else int(argument[1:]) if argument.startswith("i") else 0


def _at(place: ast.AST, node: Any) -> Any:
    """A node that says where it came from."""
    return ast.copy_location(node, place)


def _operate(x: ast.expr, how: ast.operator, number: int) -> ast.expr:
    return _at(x, ast.BinOp(x, how, _at(x, ast.Constant(number))))


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(address: int, size: int) -> np.ndarray:
    """Bytes of this process as an array; whoever owns them keeps them alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Half:
    """Half precision in memory: numbers come as float32."""

    TABLE = list(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))  # a list hands out what it holds

    def __init__(self, words: memoryview) -> None:
        self.words = words

    def __getitem__(self, i: int) -> np.float32:
        return self.TABLE[self.words[i]]

    def __setitem__(self, i: int, x: np.float32) -> None:
        self.words[i] = int(np.float16(x).view(np.uint16))


def pointer(a: np.ndarray, kind: str) -> Any:
    """What a kernel indexes where it was given `a`, whose first element is element 0. Strides of `a` are not negative."""
    size = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize if a.size else 0
    flat = memory(a.ctypes.data, size)
    if kind in ("f32", "f64"):
        return flat.view(f"float{kind[1:]}")
    words = memoryview(flat.view(f"uint{kind[1:]}"))  # type: ignore[arg-type]  # its elements are numbers of Python
    return Half(words) if kind == "f16" else words


def copy_run(array: list[Any], place: int, pointer: Any, offset: int, mask: bool) -> None:
    """Of `kivi.backends.numba_cuda.runs`, without a GPU."""
    words = pointer.words if isinstance(pointer, Half) else pointer
    length = WIDE // words.itemsize
    if place % length or not 0 <= place <= len(array) - length:
        raise IndexError(f"a run of {length} elements at element {place} of an array of {len(array)}")
    if not mask:
        array[place : place + length] = [_float32(0) if isinstance(words, np.ndarray) or pointer is not words else 0] * length
        return
    if offset + length > len(words) or (address_of(words) + offset * words.itemsize) % WIDE:
        raise IndexError(f"a run of {length} elements at element {offset} of {len(words)}, not at a multiple of {WIDE} bytes or not inside")
    array[place : place + length] = [pointer[i] for i in range(offset, offset + length)]


def address_of(words: Any) -> int:
    return words.ctypes.data if isinstance(words, np.ndarray) else ctypes.addressof(ctypes.c_char.from_buffer(words))


BARRIER = ("barrier",)  # what a thread hands over that waits for all


# -- threads ----------------------------------------------------------------------------------------------------------


class Block:
    """What the threads of one block share."""

    def __init__(self) -> None:
        self.threadIdx = SimpleNamespace(x=0)
        self.blockIdx = SimpleNamespace(x=0, y=0, z=0)
        self.shared = SimpleNamespace(array=self._shared)
        self.local = SimpleNamespace(array=lambda count, kind: [None] * count)
        self.scheduler: Any = None  # the greenlet that threads hand over to
        self.arrays: list[list[Any]] = []
        self.asked: list[int] = []  # arrays that each thread has asked for

    def start(self, threads: int, place: tuple[int, int, int]) -> None:
        self.scheduler, self.arrays, self.asked = greenlet.getcurrent(), [], [0] * threads
        self.blockIdx.x, self.blockIdx.y, self.blockIdx.z = place

    def _shared(self, count: int, kind: Any, alignment: int | None = None) -> list[Any]:
        """The next array of this thread: all threads ask in one order."""
        number = self.asked[self.threadIdx.x]
        self.asked[self.threadIdx.x] += 1
        if number == len(self.arrays):
            self.arrays.append([None] * count)
        return self.arrays[number]

    def syncthreads(self) -> None:
        self.scheduler.switch(BARRIER)

    def shfl_xor_sync(self, mask: int, value: Any, offset: int) -> Any:
        return self.scheduler.switch(("shuffle", mask, value, lambda lane: lane ^ offset))

    def shfl_down_sync(self, mask: int, value: Any, offset: int) -> Any:
        return self.scheduler.switch(("shuffle", mask, value, lambda lane: lane + offset if lane + offset < WARP else lane))


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
            "kivi.backends.numba_cuda.runs": SimpleNamespace(copy_run=copy_run),
        }
        namespace: dict[str, Any] = {"_SMALL": _SMALL, "__builtins__": {**vars(builtins), "__import__": lambda module, *_: modules[module]}}
        tree = Inline(text, signature).visit(ast.parse(text, filename))
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
        threads = [greenlet.greenlet(lambda _: self.function(*given)) for _ in range(self.threads)]
        for thread in threads:
            thread.gr_context = contextvars.copy_context()  # which holds how NumPy takes an overflow
        go_on, place = [thread.switch for thread in threads], self.cuda.threadIdx
        values: list[Any] = [None] * self.threads
        turn = list(range(self.threads))
        while turn:
            if order == "descending":
                turn.reverse()
            elif order == "random":
                rng.shuffle(turn)
            at: list[Any] = [None] * self.threads  # what each waits for; a kernel returns None
            for i in turn:
                place.x = i
                at[i] = go_on[i](values[i])
            turn = [i for i, wait in enumerate(at) if wait is not None]
            values = self._meet(at)

    def _meet(self, at: list[Any]) -> list[Any]:
        """All threads wait or are done: what each gets back."""
        values: list[Any] = [None] * self.threads
        if at.count(BARRIER) == self.threads:
            return values
        kinds = [wait and wait[0] for wait in at]
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
