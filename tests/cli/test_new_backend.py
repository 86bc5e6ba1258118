"""`kivi new-backend`: what it writes is a backend that passes, under no name but its own; what it refuses leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kivi import distributions, plugins
from kivi.cli import cli, new_backend
from kivi.errors import BackendError

NAME = "acme_npu2"
FILES = [
    "README.md",
    "pyproject.toml",
    *(f"src/{NAME}/{file}" for file in ("__init__.py", "attention.py", "backend.toml", "driver.py", "quantize.py")),
    "tests/test_conformance.py",
]


def invoke(*args):
    return CliRunner().invoke(cli, ("new-backend", *map(str, args)))


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder that the command makes."""
    out = tmp_path_factory.mktemp("out")
    done = invoke(NAME, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"name": NAME, "folder": str(out / NAME), "files": FILES}
    assert [path.name for path in out.iterdir()] == [NAME]
    return out / NAME


@pytest.fixture(scope="module")
def site(made, tmp_path_factory) -> Path:
    """Where pip installed it from a copy, which the build litters; without its dependencies, which are here."""
    source = shutil.copytree(made, tmp_path_factory.mktemp("source") / NAME)
    target = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target))
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(site, tmp_path, monkeypatch):
    """The new package beside the reference alone, so that no other backend is asked whether it can run."""
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    in_tree = [place for place in plugins._in_tree() if place[0].endswith(".reference")]
    monkeypatch.setattr(plugins, "_in_tree", lambda: in_tree)
    monkeypatch.syspath_prepend(str(site))
    distributions.forget()
    plugins.scan.cache_clear()
    yield site
    distributions.forget()
    plugins.scan.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_it_is_listed_and_behind_the_others(installed):
    done = CliRunner().invoke(cli, ("backends", "--json"))
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["reference", NAME]
    assert {key: rows[NAME][key] for key in ("available", "mode", "devices", "reason")} == {
        "available": True,
        "mode": "device",
        "devices": ["cpu"],
        "reason": "",
    }
    assert plugins.get(NAME).package == NAME
    others = [tomllib.loads(path.read_text()) for path in plugins.folder("reference").parent.glob("*/backend.toml")]
    assert plugins.get(NAME).manifest.priority < min(other["priority"] for other in others)


def test_it_passes_parts_of_every_profile(installed):
    parts = ("quantize/degenerate.*", "attention/shapes.*", "stream/schedule.*", "stream/edits.crop*")
    args = [word for part in parts for word in ("--case", part)]
    done = CliRunner().invoke(cli, ("conform", "--backend", NAME, *args, "--json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["backend"] == NAME
    assert report["summary"]["passed"] == sum(report["summary"].values()) == len(report["cases"])
    for part in parts:
        assert any(case["id"].startswith(part.rstrip("*")) for case in report["cases"])
    module = sys.modules[f"{NAME}.driver"]
    assert Path(module.__file__).parent == installed / NAME
    assert module.AcmeNpu2Backend.__module__ == f"{NAME}.driver"


def test_its_own_tests_run(made, site, tmp_path):
    """A profile passes as installed, and fails once the code is wrong: it is the copy that is tested."""
    wrong = shutil.copytree(site, tmp_path / "wrong")
    quantize = wrong / NAME / "quantize.py"
    text = quantize.read_text()
    assert "np.rint(" in text
    quantize.write_text(text.replace("np.rint(", "np.floor("))
    for where, code, said in ((site, 0, "1 passed"), (wrong, 1, "1 failed")):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(where), *sys.path]), "KIVI_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "quantize", str(made / "tests")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert f"{said}, 2 deselected" in done.stdout
        assert ("quantize/" in done.stdout) == bool(code)  # failing cases are named


def test_only_the_names_are_changed(made):
    """Line by line the copy is the reference, but for its names; nothing refers to the template."""
    for file in FILES:
        text = (made / file).read_text()
        assert "kivi.backends.reference" not in text
        assert "ReferenceBackend" not in text
    package = made / "src" / NAME
    changed = {
        path.name: [new for old, new in zip(path.read_text().splitlines(), (package / path.name).read_text().splitlines()) if old != new]
        for path in plugins.folder("reference").glob("*.py")
    }
    assert changed == {
        "__init__.py": [f'"""The backend {NAME}: plain NumPy."""'],
        "attention.py": [f"from {NAME}.quantize import exact"],
        "driver.py": [
            f'"""The backend {NAME}\'s driver: NumPy arrays in host memory, every operation in its plainest form."""',
            f"from {NAME} import attention, quantize",
            "    return AcmeNpu2Backend(manifest, mode, device, probe(mode, device).versions)",
            "class AcmeNpu2Backend(HostArrays):",
        ],
        "quantize.py": [],
    }
    manifest = tomllib.loads((package / "backend.toml").read_text())
    template = tomllib.loads((plugins.folder("reference") / "backend.toml").read_text())
    assert {key for key in template if manifest.get(key) != template[key]} == {"name", "summary", "priority", "self_check"}
    assert "self_check" not in manifest


def test_the_readme_names_methods_that_there_are(made):
    from kivi.backend import Backend

    table = [line for line in (made / "README.md").read_text().splitlines() if line.lstrip().startswith("| `")]
    named = {word for line in table for word in line.split("|")[1].replace("`", "").replace(" ", "").split(",")}
    assert named == Backend.__abstractmethods__


def test_without_json_it_prints_files_and_the_next_step(tmp_path):
    done = invoke("acme", "--out", tmp_path)
    assert done.exit_code == 0
    *files, step = done.stdout.splitlines()
    assert sorted(files) == sorted(str(path) for path in (tmp_path / "acme").rglob("*") if path.is_file())
    assert f"pip install -e '{tmp_path / 'acme'}[test]'" in step


def test_the_default_folder_is_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("acme").exit_code == 0
    assert (tmp_path / "acme" / "src" / "acme" / "driver.py").is_file()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("acme-npu", "small letters, digits and underscores"),
        ("2acme", "a letter first"),
        ("_acme", "a letter first"),
        ("acme_", "no underscore last"),
        ("Acme", "small letters"),
        ("acmé", "small letters"),
        ("a.b", "small letters"),
        ("../acme", "small letters"),
        ("", "small letters"),
        ("acme\n", "small letters"),
        ("lambda", "keyword of Python"),
        ("auto", "stands for whatever backend fits"),
        ("reference", "there is a backend 'reference' already"),
        ("triton", "there is a backend 'triton' already"),
        ("numpy", "a module that can be imported here"),
        ("json", "a module that can be imported here"),
        ("kivi", "a module that can be imported here"),
        ("winreg", "a module that can be imported here"),  # of the standard library, on one system
    ],
)
def test_a_bad_name_is_refused(name, says, tmp_path):
    done = invoke(name, "--out", tmp_path, "--json")
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "UsageError"
    assert repr(name) in error["message"]
    assert says in error["message"]
    assert listing(tmp_path) == []


def test_the_name_of_a_broken_backend_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "broken", lambda: {"acme": "no backend.toml"})
    done = invoke("acme", "--out", tmp_path)
    assert done.exit_code == 2
    assert "there is a backend 'acme' already" in done.stderr
    assert listing(tmp_path) == []


def test_the_name_of_a_folder_on_the_path_is_refused(tmp_path, monkeypatch):
    (tmp_path / "site" / "acme").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert "can be imported here" in invoke("acme", "--out", tmp_path / "out").stderr
    assert listing(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_an_existing_target_is_refused_and_kept(kind, tmp_path):
    target = tmp_path / "acme"
    {"folder": target.mkdir, "file": target.touch, "broken link": lambda: target.symlink_to("nowhere")}[kind]()
    done = invoke("acme", "--out", tmp_path)
    assert done.exit_code == 2
    assert f"{target} is there already" in done.stderr
    assert listing(tmp_path) == ["acme"]
    assert (target.is_dir(), target.is_file(), target.is_symlink()) == (kind == "folder", kind == "file", kind == "broken link")


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for out in ("nowhere", "file"):
        done = invoke("acme", "--out", tmp_path / out)
        assert done.exit_code == 2
        assert f"--out {tmp_path / out}: there is no such folder; make it first" in done.stderr
    assert listing(tmp_path) == ["file"]


def test_a_disk_that_is_full_halfway_leaves_nothing(tmp_path, monkeypatch):
    whole, count = Path.write_text, []

    def fails_at_the_fourth(self, *args, **kwargs):
        count.append(self)
        if len(count) == 4:
            raise OSError(28, "No space left on device")
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fails_at_the_fourth)
    done = invoke("acme", "--out", tmp_path)
    assert done.exit_code == 2
    assert f"{tmp_path / 'acme'} cannot be written: No space left on device" in done.stderr
    assert len(count) == 4
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("driver.py", "class ReferenceBackend", "class TheReferenceOfAll", "driver.py says 'reference' otherwise"),
        ("quantize.py", "def exact", "# as backends.reference does\ndef exact", "quantize.py says 'reference' otherwise"),
        ("__init__.py", "The reference backend", "A backend", "__init__.py says 'reference' otherwise|no Python file"),
        ("backend.toml", "priority = 0", "priority = 0  # the last", "the line 'priority = 0' once"),
        ("backend.toml", "self_check = false ", "self_check = false", "'self_check = false    # it defines"),
        ("backend.toml", "exp_ulp = 1.0", "exp_ulp = 2.0", "differs in more than"),
    ],
)
def test_a_template_that_is_not_as_expected_is_an_error(file, old, new, says, tmp_path, monkeypatch):
    changed = shutil.copytree(plugins.folder("reference"), tmp_path / "changed")
    text = (changed / file).read_text()
    assert old in text
    (changed / file).write_text(text.replace(old, new))
    if file == "__init__.py":  # the other file that says so
        driver = changed / "driver.py"
        driver.write_text(driver.read_text().replace(old, new))
    monkeypatch.setattr(plugins, "folder", lambda name: changed)
    with pytest.raises(BackendError, match=says):
        new_backend.copied("acme")
    (tmp_path / "out").mkdir()
    done = invoke("acme", "--out", tmp_path / "out", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["type"] == "BackendError"
    assert listing(tmp_path / "out") == []
