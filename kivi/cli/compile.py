"""`kivi compile`: every stage of a kernel, from IR to machine code, without a device."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from kivi.cli.output import json_option, print_json, print_table
from kivi.errors import InputError


@click.command("compile")
@click.option("--spec", "source", default="kivi-2bit", show_default=True, help="A preset or a TOML file.")
@click.option("--backend", default="triton", show_default=True)
@click.option("--entry", help="The kernel; without it, the kernels are listed.")
@click.option(
    "--emit",
    "stage",
    default="source",
    show_default=True,
    help="A stage of the backend: kv, tile, simt, vec, source, ptx, cubin, amdgcn, hsaco, asm, object, onnx.",
)
@click.option("--resources", is_flag=True, help="Instead: registers and spilled bytes of the kernel, or of all, compiled for the target.")
@click.option(
    "--target", help="Such as sm_90, gfx942 or x86-64-v3; an unknown one is answered with those of the backend. Default: the backend's."
)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--value-head-dim", type=int, help="Default: the head dimension.")
@click.option("--q-heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--dtype", default="float16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file; needed for cubin, hsaco, object and onnx.")
@json_option
def compile_(
    source: str,
    backend: str,
    entry: str | None,
    stage: str,
    resources: bool,
    target: str | None,
    head_dim: int,
    value_head_dim: int | None,
    q_heads: int,
    kv_heads: int,
    dtype: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show what becomes of a spec: the `kv` module that a kernel comes from, its `tile` IR, its source, and what a GPU's compiler
    makes of it."""
    from kivi import plugins
    from kivi.geometry import geometry
    from kivi.spec import load_spec

    compiler = plugins.offline(backend)
    for name, value, known in (("emit", stage, compiler.STAGES), ("target", target, compiler.TARGETS)):
        if value is not None and value not in known:
            raise InputError(f"{name} = {value!r}; known are {', '.join(known)}")
    spec = load_spec(source)
    kernels = compiler.entries(spec, geometry(q_heads, kv_heads, head_dim, value_head_dim, dtype, None, None, None))
    if entry is not None and entry not in kernels:
        raise InputError(f"entry = {entry!r}; the kernels are {', '.join(kernels)}")
    if resources:
        if out is not None:
            raise InputError("--out is for what --emit shows; the figures of --resources go to a file by --json")
        if not hasattr(compiler, "resources"):
            raise InputError(f"backend {backend!r} compiles for no GPU, so there are no registers to count")
        wanted = kernels if entry is None else {entry: kernels[entry]}
        target = target or inspect.signature(compiler.resources).parameters["target"].default
        found = {name: compiler.resources(request, target) for name, request in wanted.items()}
        if as_json:
            print_json({"backend": backend, "spec": spec.hash, "target": target, "resources": found})
        else:
            columns = [name.replace("_", " ") for name in next(iter(found.values()))]
            print_table(("entry", *columns), [(name, *row.values()) for name, row in found.items()], right=columns)
        return
    if entry is None:
        if out is not None:
            raise InputError("--out needs --entry: name the kernel to write")
        if as_json:
            print_json(
                {"backend": backend, "spec": spec.hash, "entries": list(kernels), "stages": compiler.STAGES, "targets": compiler.TARGETS}
            )
        else:
            print_table(("entry",), [(name,) for name in kernels])
        return
    made = compiler.emit(kernels[entry], stage, *([] if target is None else [target]))
    if out is not None:
        out.write_bytes(made if isinstance(made, bytes) else made.encode())
    elif isinstance(made, bytes):
        raise InputError(f"{stage} is {len(made)} bytes and no text; name a file with --out")
    if as_json:
        print_json(
            {"entry": entry, "stage": stage, "target": target, "bytes": len(made), "text": None if out or isinstance(made, bytes) else made}
        )
    elif out is None:
        click.echo(made)
