"""Cleaning: what is folded, joined and removed, and that xDSL's own passes find nothing more."""

from __future__ import annotations

import pytest
from xdsl.transforms.canonicalize import CanonicalizePass
from xdsl.transforms.common_subexpression_elimination import CommonSubexpressionElimination

import kivi
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import context, parse
from kivi.layout import named_layout
from kivi.passes import rewrites, tile_to_simt
from kivi.passes.attention import attention_kernel
from kivi.passes.clean import clean, sweep
from kivi.pool import PageFormat
from kivi.schedule import Schedule

HEAD = "func.func @k(%p: !tile.ptr<i32>, %q: !tile.ptr<i32>, %n: i32, %b: i1) {\n"
STORE = "tile.store {value}, %q[%n] : i32, !tile.ptr<i32>, i32\n"


def cleaned(body: str) -> str:
    module = parse(f"{HEAD}{body}func.return\n}}", Tile, Simt)
    clean(module)
    module.verify()
    text = str(module)
    clean(module)
    assert str(module) == text  # once is enough
    return text


@pytest.mark.parametrize(
    ("expression", "known"),
    [
        ("%x = arith.addi %four, %two : i32", "constant 6 : i32"),
        ("%x = arith.muli %n, %zero : i32", "constant 0 : i32"),
        ("%y = arith.muli %one, %four : i32\n%x = arith.addi %y, %two : i32", "constant 6 : i32"),
    ],
)
def test_constants_are_folded(expression, known):
    constants = "".join(f"%{name} = arith.constant {n} : i32\n" for name, n in (("zero", 0), ("one", 1), ("two", 2), ("four", 4)))
    text = cleaned(f"{constants}{expression}\n{STORE.format(value='%x')}")
    assert known in text
    assert text.count("arith.") == 1


@pytest.mark.parametrize(
    "identity", ["%x = arith.addi %zero, %n : i32", "%x = arith.muli %n, %one : i32", "%x = arith.subi %n, %zero : i32"]
)
def test_identities_are_folded(identity):
    text = cleaned(f"%zero = arith.constant 0 : i32\n%one = arith.constant 1 : i32\n{identity}\n{STORE.format(value='%x')}")
    assert "arith." not in text
    assert "tile.store %n," in text


def test_floats_are_left_alone():
    """1 + 0 is 1 only until a sign of zero or a NaN says otherwise; and what rounds, rounds at run time."""
    text = cleaned(
        "%a = arith.constant 1.0 : f32\n%z = arith.constant 0.0 : f32\n%x = arith.addf %a, %z : f32\n"
        "%i = arith.bitcast %x : f32 to i32\n" + STORE.format(value="%i")
    )
    assert "arith.addf" in text


def test_constants_leave_loops_and_are_one_of_a_kind():
    text = cleaned(
        "%lo = arith.constant 0 : i32\n%st = arith.constant 1 : i32\nscf.for %i = %lo to %n step %st : i32 {\n"
        "%c = arith.constant 7 : i32\n%d = arith.constant 7 : i32\n%e = arith.addi %c, %i : i32\n%f = arith.muli %d, %e : i32\n"
        f"{STORE.format(value='%f')}}}\n"
    )
    assert text.count("constant 7") == 1
    assert text.index("constant 7") < text.index("scf.for")


@pytest.mark.parametrize(("high", "stores", "loops"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
def test_loops_of_no_and_of_one_turn(high, stores, loops):
    text = cleaned(
        f"%lo = arith.constant 0 : i32\n%hi = arith.constant {high} : i32\n%st = arith.constant 1 : i32\n"
        "%r = scf.for %i = %lo to %hi step %st iter_args(%a = %n) -> (i32) : i32 {\n"
        f"%f = arith.addi %a, %i : i32\n{STORE.format(value='%f')}scf.yield %f : i32\n}}\n"
    )
    assert (text.count("tile.store"), text.count("scf.for")) == (stores, loops)


def test_what_a_loop_of_no_turn_carries_is_where_it_began():
    text = cleaned(
        "%lo = arith.constant 0 : i32\n%st = arith.constant 1 : i32\n"
        "%r = scf.for %i = %lo to %lo step %st iter_args(%a = %n) -> (i32) : i32 {\n"
        f"%f = arith.addi %a, %i : i32\nscf.yield %f : i32\n}}\n{STORE.format(value='%r')}"
    )
    assert "tile.store %n," in text


@pytest.mark.parametrize(("condition", "kept"), [("true", "%p"), ("false", "%q")])
def test_branches_that_are_known(condition, kept):
    text = cleaned(
        f"%c = arith.constant {condition}\nscf.if %c {{\ntile.store %n, %p[%n] : i32, !tile.ptr<i32>, i32\n}} else {{\n"
        f"{STORE.format(value='%n')}}}\n"
    )
    assert "scf.if" not in text
    assert text.count("tile.store") == 1
    assert f"{kept}[%n]" in text


LOAD = "%{name} = tile.load %p[%n] : !tile.ptr<i32>, i32 -> i32\n"


@pytest.mark.parametrize(
    ("between", "loads"),
    [
        ("", 1),
        (STORE.format(value="%n"), 2),  # a pointer may be another's
        ("scf.if %b {\n" + STORE.format(value="%n") + "}\n", 2),
        ("simt.barrier\n", 2),
    ],
)
def test_loads_are_joined_up_to_the_next_write(between, loads):
    body = LOAD.format(name="a") + between + LOAD.format(name="c") + "%s = arith.addi %a, %c : i32\n" + STORE.format(value="%s")
    assert cleaned(body).count("tile.load") == loads


def test_what_is_known_in_a_branch_is_not_known_after_it():
    body = (
        "scf.if %b {\n%x = arith.addi %n, %n : i32\n" + STORE.format(value="%x") + "}\n"
        "%y = arith.addi %n, %n : i32\n" + STORE.format(value="%y")
    )
    assert cleaned(body).count("arith.addi") == 2


def test_dead_code_goes_and_effects_stay():
    module = parse(
        f"{HEAD}%x = arith.addi %n, %n : i32\n%y = arith.muli %x, %x : i32\n{LOAD.format(name='l')}"
        "%lo = arith.constant 0 : i32\n%st = arith.constant 1 : i32\n"
        "%r = scf.for %i = %lo to %n step %st iter_args(%a = %y) -> (i32) : i32 {\n%f = arith.addi %a, %i : i32\nscf.yield %f : i32\n}\n"
        f"simt.barrier\n{STORE.format(value='%n')}func.return\n}}",
        Tile,
        Simt,
    )
    sweep(module)
    assert [op.name for op in module.body.block.first_op.body.block.ops] == ["simt.barrier", "tile.store", "func.return"]


@pytest.mark.parametrize("zone", ["history", "tail"])
@pytest.mark.parametrize("level", ["tile", "simt"])
def test_xdsl_finds_no_more(zone, level, monkeypatch):
    """On kernels of attention, canonicalization and common subexpression elimination, repeated, end with as many operations."""
    for user in (rewrites, tile_to_simt):
        monkeypatch.setattr(user, "clean", lambda module: None)
    spec = kivi.CacheSpec(name="clean").override(
        {f"{side}.{n}": v for side in ("key", "value") for n, v in (("group", 8), ("residual", 16))}
    )
    form = PageFormat(spec, named_layout("hp16"), 1, 20, 20, "float16", "float16")
    schedule = Schedule(tokens=8, queries=1, rewrites=("fold_scale",), threads=32)
    module = attention_kernel(zone, form, 2, "float16", schedule).module
    if level == "simt":
        clean(module)
        module = tile_to_simt.lower(module, 32)
    other, before = module.clone(), sum(1 for _ in module.walk())
    clean(module)
    for step in (CanonicalizePass(), CommonSubexpressionElimination(), CanonicalizePass()):
        step.apply(context(Tile, Simt), other)
    after = sum(1 for _ in module.walk())
    assert after == sum(1 for _ in other.walk())
    assert after < before
