"""`kivi new-backend`: the folder from which a port to new hardware starts.

It is a copy of the backend `reference` under another name, as a package of its own, so that it passes the suite before its first
change. The copy is made from the files that run, not from a template that could fall behind them; a text that is to be changed
and is not there is an error.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import sys
import tempfile
from pathlib import Path

import click

from kivi.cli.output import json_option, print_json
from kivi.errors import BackendError

TEMPLATE = "reference"
PRIORITY = -10
#: Words that stand in the place of a backend's name: `backend = "auto"`.
RESERVED = ("auto",)
NAME = re.compile(r"[a-z]([a-z0-9_]*[a-z0-9])?")


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path(), show_default="the current one", metavar="FOLDER", help="Where to make it."
)
@json_option
def new_backend(name: str, out: Path, as_json: bool) -> None:
    """Write FOLDER/NAME, a package with a backend that passes the suite, to be replaced part by part.

    It begins as a copy of the backend `reference`. Installed with pip, it is a backend like any other: `kivi backends` lists it. Its
    README.md says what to replace first.
    """
    check_name(name)
    target = out / name
    if not out.is_dir():
        raise click.BadParameter(f"--out {out}: there is no such folder; make it first")
    if os.path.lexists(target):
        raise click.BadParameter(f"{target} is there already, and nothing is overwritten; take another name or --out, or move it away")
    check_free(name)
    texts = project(name)
    write(target, texts)
    if as_json:
        print_json({"name": name, "folder": str(target.resolve()), "files": sorted(texts)})
        return
    for file in sorted(texts):
        click.echo(target / file)
    click.echo(f"next: pip install -e '{target}[test]', then kivi conform --backend {name}; {target / 'README.md'} says how to go on")


def check_name(name: str) -> None:
    """Raises `click.BadParameter` for what cannot be the name of a package and of a backend."""
    if not NAME.fullmatch(name):
        raise click.BadParameter(
            f"{name!r} cannot be the name of a package; use small letters, digits and underscores, a letter first and no underscore last"
        )
    if keyword.iskeyword(name):
        raise click.BadParameter(f"{name!r} is a keyword of Python and cannot be imported; take another name")
    if name in RESERVED:
        raise click.BadParameter(f"{name!r} stands for whatever backend fits and cannot be the name of one; take another name")


def check_free(name: str) -> None:
    """Raises `click.BadParameter` for a name that a backend or a module has here."""
    from kivi import plugins

    if name in plugins.found() or name in plugins.broken():
        raise click.BadParameter(
            f"there is a backend {name!r} already, and two may not share a name; take another name, or uninstall that one"
        )
    if name in sys.stdlib_module_names or name in sys.modules or importlib.util.find_spec(name) is not None:
        raise click.BadParameter(f"{name!r} is a module that can be imported here, which the new package would hide; take another name")


def project(name: str) -> dict[str, str]:
    """Path inside the new folder -> text."""
    package = {f"src/{name}/{file}": text for file, text in copied(name).items()}
    return {
        "pyproject.toml": PYPROJECT.format(name=name, distribution=distribution(name)),
        "README.md": README.format(name=name),
        "tests/test_conformance.py": TESTS.format(name=name),
    } | package


def distribution(name: str) -> str:
    """What pip calls the package. With a prefix, since a vendor's own package often has the plain name."""
    return f"kivi-backend-{name.replace('_', '-')}"


def copied(name: str) -> dict[str, str]:
    """File -> text of the template's package under the new name. Raises `BackendError` where its text is not as expected."""
    from kivi import plugins

    texts = {path.name: path.read_text("utf-8") for path in sorted(plugins.folder(TEMPLATE).iterdir()) if path.suffix in (".py", ".toml")}
    manifest = texts.pop("backend.toml")
    return {"backend.toml": renamed_manifest(manifest, name)} | renamed_sources(texts, name)


def renamed_sources(texts: dict[str, str], name: str) -> dict[str, str]:
    """Python files with the template's package, class and name changed; none of them may speak of the template in another way."""
    class_name = "".join(part.capitalize() for part in name.split("_")) + "Backend"
    changes = {
        f"kivi.backends.{TEMPLATE}": name,
        f"{TEMPLATE.capitalize()}Backend": class_name,
        f"The {TEMPLATE} backend": f"The backend {name}",
    }
    for old in changes:
        if not any(old in text for text in texts.values()):
            raise _unexpected(f"no Python file of it says {old!r}")
    out = {}
    for file, text in texts.items():
        if text.lower().count(TEMPLATE) != sum(text.count(old) for old in changes):
            raise _unexpected(f"{file} says {TEMPLATE!r} otherwise than in {', '.join(map(repr, changes))}")
        for old, new in changes.items():
            text = text.replace(old, new)
        out[file] = text
    return out


def renamed_manifest(text: str, name: str) -> str:
    """The manifest with name, summary and priority changed, and checked on a device before use, which the template need not be."""
    import msgspec

    from kivi import plugins
    from kivi.backend import read_manifest

    old = plugins.get(TEMPLATE).manifest
    summary = f"kivi on {name}"
    lines = {
        f'name = "{TEMPLATE}"\n': f'name = "{name}"\n',
        f'summary = "{old.summary}"\n': f'summary = "{summary}"\n',
        f"priority = {old.priority}\n": f"priority = {PRIORITY}    # taken only by name; raise it when it is faster than the others\n",
        "self_check = false    # it defines the truth that others are checked against\n": "",
    }
    for line, new in lines.items():
        if text.count(line) != 1:
            raise _unexpected(f"its backend.toml does not hold the line {line.strip()!r} once")
        text = text.replace(line, new)
    wanted = msgspec.structs.replace(old, name=name, summary=summary, priority=PRIORITY, self_check=True, extra=None)
    if read_manifest(text, f"backend.toml of {name}") != wanted:
        raise _unexpected("its backend.toml differs in more than name, summary, priority and self_check from what its copy must be")
    return text


def _unexpected(what: str) -> BackendError:
    return BackendError(
        f"backend {TEMPLATE!r} is not as `kivi new-backend` expects: {what}; nothing was written; install kivi-kvcache anew, "
        f"or bring kivi/cli/new_backend.py up to date"
    )


def write(target: Path, texts: dict[str, str]) -> None:
    """The files under `target`, all or none: they are written beside it and moved. Raises `click.BadParameter` if that cannot be."""
    try:
        with tempfile.TemporaryDirectory(prefix=".kivi-", dir=target.parent) as beside:
            whole = Path(beside) / target.name
            for file, text in texts.items():
                path = whole / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8", newline="\n")
            whole.rename(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.BadParameter(f"{target} cannot be written: {reason}; name a folder by --out that can hold it") from None


PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "kivi's KV cache on {name}"
requires-python = ">=3.11"
dependencies = ["kivi-kvcache"]    # the vendor's package belongs here too, and into `requires` of backend.toml

[project.optional-dependencies]
test = ["pytest"]

# How kivi finds the backend: the value is the package that holds backend.toml.
[project.entry-points."kivi.backends"]
{name} = "{name}"

[tool.setuptools.package-data]
"*" = ["*.toml"]
"""

TESTS = '''\
"""The quick conformance suite on {name}, in its first mode that can run here; `kivi conform --backend {name} --size full` runs all."""

import pytest

from kivi import conformance


@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_conforms(profile):
    report = conformance.run("{name}", profile=profile, size="quick")
    wrong = [f"{{case.id}}: {{case.status}}: {{case.reason}}" for case in report.failures()]
    assert report.ok, "\\n".join(wrong) or "no case passed"
'''

README = """\
# {name}: a backend of kivi

The package in `src/{name}` began as a copy of kivi's backend `reference` (Apache-2.0): NumPy on the host, which passes the conformance
suite. It becomes a port as its parts are replaced, one by one; after each the suite says whether it still computes what the spec says.

In the environment that holds kivi:

```
pip install -e '.[test]'
kivi backends    # lists {name}
kivi conform --backend {name} --profile all    # passes before the first change
python -m pytest    # the same, as tests
```

## Next steps
1. driver.py: let `probe` say which devices there are, and name their kind in `[modes]` of backend.toml. Put the vendor's package into
   `requires` there and into the dependencies of pyproject.toml. Only driver.py, and what it imports, may import it.
2. Replace these, in this order. A part may at first copy its arrays to the device and back.

   | methods of the driver's class | compute | decided by |
   |---|---|---|
   | `encode`, `codes`, `dequantize`, `relayout` | whole tensors: quantize, pack, unpack, repack (quantize.py) | `--profile quantize` |
   | `attend` | attention over pages, window and chunk (attention.py) | `--profile attention` |
   | `append` | new rows into the windows, full groups sealed into pages | `--profile stream` |
   | `adopt`, `give`, `zeros`, `to_host`, `from_host` | arrays, to be kept on the device; so far `kivi.host.HostArrays` | `--profile all` |
   | `gather`, `page_views`, `copy_page`, `first_bad` | small operations on them, from there too | `--profile all` |

3. `[capabilities]` of backend.toml: declare what is served and nothing else; the rest is refused and counts as unsupported.
4. `[numerics]` of backend.toml: declare the roundoffs of the new attention; the suite derives its bounds from them.
5. `kivi conform --backend {name} --profile all --size full`, in every mode of the manifest.
6. When it is faster than the others, raise `priority`, so that kivi selects it unasked.

`PORTING.md` in the folder of the package `kivi.conformance` goes through the steps and lists the usual culprits. To generate kernels
from kivi's IR instead of writing them, subclass `kivi.kernels.backend.KernelBackend`; kivi's backend `triton` is the shortest example.
"""
