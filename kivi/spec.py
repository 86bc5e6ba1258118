"""`CacheSpec`: what a quantized KV cache is, as frozen data.

The types below are the only definition of the spec's fields: they validate TOML, give the defaults, and are the source of
`spec/kivi-spec.schema.json`. Rules that a type cannot state are checked in `__post_init__`, so no invalid spec exists.
Normative text: spec/SPEC.md, sections 1 and 2.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kivi.errors import NotImplementedYetError, SpecError
from kivi.layout import Layout, arrangement, layouts, named_layout

Metadata = Literal["float16", "bfloat16", "float32", "input", "int8", "float8_e4m3"]
Group = Annotated[int, Meta(ge=2, le=4096, description="elements that share one scale and one origin")]
Residual = Annotated[int, Meta(ge=2, le=65536, description="tokens kept in floating point")]
Shrink = Annotated[float, Meta(gt=0.0, le=1.0, description="factor on the range about its centre")]


class KeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How keys are stored. One group is `group` consecutive tokens of one channel (SPEC 2.2)."""

    axis: Literal["channel", "token"] = "channel"
    bits: Literal[1, 2, 3, 4, 8] = 2
    group: Group = 32
    residual: Residual = 128
    seal: Literal["block", "sliding"] = "block"
    grid: Literal["asymmetric", "symmetric"] = "asymmetric"
    shrink: Shrink = 1.0
    rotate: Literal["none", "hadamard"] = "none"
    metadata: Metadata = "float16"


class ValueSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How values are stored. One group is `group` consecutive channels of one token (SPEC 2.3)."""

    axis: Literal["channel", "token"] = "token"
    bits: Literal[1, 2, 3, 4, 8] = 2
    group: Group = 32
    residual: Residual = 128
    seal: Literal["block", "sliding"] = "sliding"
    grid: Literal["asymmetric", "symmetric"] = "asymmetric"
    shrink: Shrink = 1.0
    rotate: Literal["none", "hadamard"] = "none"
    metadata: Metadata = "float16"


class Packing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where codes lie in memory: `"auto"` (the backend's native layout), a name, or a layout written out (SPEC 8)."""

    layout: str | Layout = "auto"


class Layers(dict[str, str]):
    """Exceptions by layer, read-only like the spec that holds them."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SpecError("a spec cannot be changed; use spec.override({'layers': {...}})")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse  # type: ignore[assignment]


class CacheSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quantized KV cache. Frozen and valid by construction.

    Raises `SpecError` for a broken rule and `NotImplementedYetError` for a value that is defined but not built yet.
    """

    kivi_spec: Literal[1] = 1
    name: str = "unnamed"
    numerics: Literal["portable", "staged"] = "portable"
    order: Literal["attend_then_seal", "seal_then_attend"] = "attend_then_seal"
    nonfinite: Literal["reject", "propagate"] = "reject"
    overflow: Literal["reject", "saturate"] = "reject"
    sink_tokens: Annotated[int, Meta(ge=0, le=65536)] = 0
    key: KeySpec = KeySpec()
    value: ValueSpec = ValueSpec()
    packing: Packing = Packing()
    layers: dict[str, str] = {}

    def __post_init__(self) -> None:
        _check_types(self)
        msgspec.structs.force_setattr(self, "layers", Layers(self.layers))
        _check_rules(self)
        _check_implemented(self)

    def __hash__(self) -> int:  # `layers` is a dictionary, so the generated one would fail
        return hash(
            (self.name, self.numerics, self.order, self.nonfinite, self.overflow, self.sink_tokens, self.key, self.value, self.packing)
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical form: all fields but the name, defaults written out, keys sorted (SPEC 1.4)."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """The canonical JSON text behind `hash`."""
        fields = self.to_dict()
        del fields["name"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python data, nested as in TOML."""
        return msgspec.to_builtins(self)

    def override(self, changes: Mapping[str, Any]) -> CacheSpec:
        """A copy with some fields changed, e.g. `{"key.bits": 4, "value.group": 64}`.

        Names are dotted paths of the TOML form; `{"key": {"bits": 4}}` says the same as `{"key.bits": 4}`. Raises `SpecError` for an
        unknown path or an invalid result.
        """
        fields = self.to_dict()
        if not isinstance(changes, Mapping) or not all(isinstance(path, str) for path in changes):
            raise SpecError(f"override takes a dictionary from field names to values, such as {{'key.bits': 4}}, not {changes!r}")
        for path, given in _flat(changes).items():
            value = given.item() if isinstance(given, np.generic) else given
            *parents, leaf = path.split(".")
            found: Any = fields
            for part in parents:
                found = found.get(part) if isinstance(found, dict) else None
            table: dict[str, Any] = found if isinstance(found, dict) else {}
            if leaf not in table and (table is not fields["layers"] or len(parents) != 1):
                raise SpecError(f"override names {path!r}, which is not a field of a spec; the fields are: {', '.join(field_paths())}")
            table[leaf] = value
        return from_dict(fields)


def _flat(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with the tables of a spec opened, so that their other fields stay as they are."""
    out: dict[str, Any] = {}
    for path, given in changes.items():
        tables = path in ("key", "value", "packing") and isinstance(given, Mapping)
        out |= {f"{path}.{name}": value for name, value in given.items()} if tables else {path: given}
    return out


def from_dict(fields: Mapping[str, Any]) -> CacheSpec:
    """A spec from plain data. Raises `SpecError`; the message names the field, its value's fault and the rule."""
    try:
        return msgspec.convert(fields, CacheSpec)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, SpecError):
            raise cause from None
        raise SpecError(_explain(error, fields)) from None


def load_spec(source: str | Path | CacheSpec) -> CacheSpec:
    """A spec from a preset's name or the path of a TOML file. A `CacheSpec` is returned as it is.

    Raises `SpecError` for an unknown preset, an unreadable file, bad TOML, or a broken rule. Reading a spec executes nothing.
    """
    if isinstance(source, CacheSpec):
        return source
    if not isinstance(source, (str, Path)):
        raise SpecError(f"a spec is a preset's name, a path or a CacheSpec, not {type(source).__name__}")
    known = presets()
    if str(source) in known:
        text, where = (_data("presets") / f"{source}.toml").read_text("utf-8"), f"preset {source}"
    else:
        path = Path(source)
        if not _is_file(path):
            raise SpecError(f"{str(source)!r} is neither a preset ({', '.join(known)}) nor a file; give one of these or a TOML path")
        where = str(path)
        try:
            text = path.read_text("utf-8-sig")  # some editors put a mark in front
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{where} cannot be read as UTF-8 text: {error}") from None
    try:
        fields = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # bad TOML, numbers without end, nesting without end
        raise SpecError(f"{where} is not valid TOML: {error}") from None
    try:
        return from_dict(fields)
    except SpecError as error:
        raise type(error)(f"{where}: {error}") from None


def presets() -> list[str]:
    """Names of the presets that ship with kivi, sorted."""
    return sorted(p.name.removesuffix(".toml") for p in _data("presets").iterdir() if p.name.endswith(".toml"))


def schema() -> dict[str, Any]:
    """The JSON schema of a spec file, generated from the types of this module."""
    out = msgspec.json.schema(CacheSpec)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kivi cache spec", **out}


@cache
def field_paths() -> tuple[str, ...]:
    """Dotted paths of all fields, as `override` takes them."""

    def walk(table: Mapping[str, Any], prefix: str) -> list[str]:
        out: list[str] = []
        for key, value in table.items():
            nested = isinstance(value, dict) and value
            out += walk(value, f"{prefix}{key}.") if nested else [prefix + key]
        return out

    return tuple(walk(CacheSpec().to_dict(), ""))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _data(folder: str) -> Traversable:
    return resources.files("kivi") / "_spec" / folder


def _explain(error: msgspec.ValidationError, fields: Mapping[str, Any]) -> str:
    """msgspec's message, with the offending value and, for a choice, the allowed ones."""
    text = str(error)
    match = re.search(r" - at `\$\.?([\w.\-]*)", text)
    if not match:
        return text + (f"; the fields are: {', '.join(field_paths())}" if "unknown field" in text else "")
    path = match[1]
    value: Any = fields
    for part in path.split(".") if path else []:
        value = value.get(part) if isinstance(value, Mapping) else None
    if "unknown field" in text:
        allowed = [p for p in field_paths() if p.startswith(path + ".")] if path else field_paths()
        if path == "packing.layout":
            allowed = [f"{path}.{name}" for name in Layout.__struct_fields__]
        return f"{text}; the fields are: {', '.join(allowed)}"
    return f"{path} = {value!r}: {text.split(' - at ')[0]}{_choices(path)}"


def _choices(path: str) -> str:
    node: Any = CacheSpec
    for part in path.split("."):
        field = next((f for f in msgspec.structs.fields(node) if f.name == part), None) if isinstance(node, type) else None
        if field is None:
            return ""
        node = field.type
    options = getattr(node, "__args__", ())
    if options and all(isinstance(o, (int, str)) for o in options):
        return f"; allowed: {', '.join(repr(o) for o in options)}"
    return ""


def _check_types(spec: CacheSpec) -> None:
    """What msgspec checks when it reads a file, for specs that are made in Python."""
    for field in msgspec.structs.fields(CacheSpec):
        try:
            msgspec.convert(msgspec.to_builtins(getattr(spec, field.name)), field.type)
        except (msgspec.ValidationError, TypeError) as error:
            raise SpecError(f"{field.name} = {getattr(spec, field.name)!r}: {error}") from None


def _check_rules(spec: CacheSpec) -> None:
    key, value = spec.key, spec.value
    if not spec.name.isprintable() or len(spec.name) > 200:
        raise SpecError(f"name = {spec.name[:50]!r}... must be at most 200 printable characters")
    if key.residual % key.group:
        nearest = max(1, round(key.residual / key.group)) * key.group
        raise SpecError(
            f"key.residual = {key.residual} is not a multiple of key.group = {key.group}: keys are sealed in blocks of whole groups; "
            f"use key.residual = {nearest}"
        )
    if value.residual < key.residual:
        raise SpecError(
            f"value.residual = {value.residual} is less than key.residual = {key.residual}: sealed values may not overtake sealed keys; "
            f"use value.residual >= {key.residual}"
        )
    if spec.numerics == "staged":
        for side, part in (("key", key), ("value", value)):
            if part.metadata not in ("input", "float16", "bfloat16", "float32"):
                raise SpecError(
                    f"{side}.metadata = {part.metadata!r} does not fit numerics = 'staged', which stores metadata in the input dtype; "
                    f"use {side}.metadata = 'input'"
                )
    if spec.packing.layout != "auto":
        layout = spec.packing.layout if isinstance(spec.packing.layout, Layout) else named_layout(spec.packing.layout)
        if layout.name == "auto" or (layout.name in layouts() and layout != named_layout(layout.name)):
            raise SpecError(f"packing.layout is written out under the name {layout.name!r}, which is taken; give it another one")
        for which, bits in (("key", key.bits), ("value", value.bits)):
            arrangement(layout, which, bits, key.residual, 1)  # type: ignore[arg-type]
    for layers, choice in spec.layers.items():
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", layers)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise SpecError(f"layers.{layers!r} is not a layer number or an ascending range like '1-3'")
        if choice != "full" and choice not in presets():
            raise SpecError(f"layers.{layers!r} = {choice!r} is neither 'full' nor a preset ({', '.join(presets())})")


# Values that the spec language defines and this release does not build: field path -> the values that work today.
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "sink_tokens": (0,),
    "key.axis": ("channel",),
    "value.axis": ("token",),
    "key.seal": ("block",),
    "value.seal": ("sliding",),
    "key.grid": ("asymmetric",),
    "value.grid": ("asymmetric",),
    "key.shrink": (1.0,),
    "value.shrink": (1.0,),
    "key.rotate": ("none",),
    "value.rotate": ("none",),
    "key.metadata": ("float16", "bfloat16", "float32", "input"),
    "value.metadata": ("float16", "bfloat16", "float32", "input"),
    "layers": ({},),
}


def _check_implemented(spec: CacheSpec) -> None:
    for path, allowed in IMPLEMENTED.items():
        value: Any = spec
        for part in path.split("."):
            value = getattr(value, part)
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise NotImplementedYetError(f"{path} = {value!r} is not implemented yet; this release serves {path} = {choices}")
