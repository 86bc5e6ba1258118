"""What ships. The linked folders must be in sdist and wheel as real files: a build that loses them succeeds silently."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kivi

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[2]
DIST_INFO = f"kivi_kvcache-{kivi.__version__}.dist-info"
LINKS = {"backends": "kivi/backends", "conformance": "kivi/conformance", "spec": "kivi/_spec"}
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "out", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage*"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources without anything built: a stale build folder would put deleted files into a wheel."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clean") / "kivi", symlinks=True, ignore=NOT_SOURCE)


@pytest.fixture(scope="module")
def dist(tree) -> dict[str, Path]:
    """{"sdist": path, "wheel": path of the wheel built from the sdist}."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree.parent / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"sdist": next((tree.parent / "dist").glob("*.tar.gz")), "wheel": next((tree.parent / "dist").glob("*.whl"))}


@pytest.fixture(scope="module")
def wheel_names(dist) -> set[str]:
    with zipfile.ZipFile(dist["wheel"]) as wheel:
        return set(wheel.namelist())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_links_are_links():
    for top, linked in LINKS.items():
        assert (ROOT / linked).is_symlink(), f"{linked} is not a link; check out with core.symlinks = true"
        assert (ROOT / linked).resolve() == (ROOT / top).resolve()


@pytest.mark.parametrize("top", LINKS)
def test_every_file_of_a_linked_folder_is_in_the_wheel(top, tree, wheel_names):
    wanted = {f"{LINKS[top]}/{name}" for name in files(tree / top)}
    assert wanted, f"{top}/ is empty"
    assert wanted - wheel_names == set(), "an ending that [tool.setuptools.package-data] does not name?"


def test_every_file_of_the_library_is_in_the_wheel(tree, wheel_names):
    wanted = {f"kivi/{name}" for name in files(tree / "kivi")}
    assert {"kivi/__init__.py", "kivi/py.typed", "kivi/cli/__init__.py"} <= wanted
    assert wanted - wheel_names == set()


def test_the_wheel_holds_the_library_and_nothing_else(wheel_names):
    assert {name.partition("/")[0] for name in wheel_names} == {"kivi", DIST_INFO}
    assert not [name for name in wheel_names if "__pycache__" in name or name.split("/")[-1].startswith(("test_", "conftest"))]
    assert f"{DIST_INFO}/licenses/LICENSE" in wheel_names


def test_the_sdist_holds_the_linked_folders(tree, dist):
    with tarfile.open(dist["sdist"]) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
    for top, linked in LINKS.items():
        for name in files(tree / top):
            assert members[f"{linked}/{name}"].isfile()


def test_a_wheel_from_the_tree_equals_the_one_from_the_sdist(tree, dist, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(tree)]
    subprocess.run(command, capture_output=True, check=True)

    def checksums(path: Path) -> dict[str, int]:
        with zipfile.ZipFile(path) as wheel:
            return {i.filename: i.CRC for i in wheel.infolist() if ".dist-info/" not in i.filename}

    assert checksums(next(tmp_path.glob("*.whl"))) == checksums(dist["wheel"])


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Path:
    """A folder into which the wheel was installed without its dependencies, which the running environment has."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(dist["wheel"])]
    subprocess.run(command, capture_output=True, check=True)
    return target


def run(installed: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=installed, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_wheel_is_what_runs(installed):
    assert Path(run(installed, sys.executable, "-c", "import kivi; print(kivi.__file__)").strip()).is_relative_to(installed)


def test_the_installed_command_line(installed):
    script = str(installed / "bin" / "kivi")
    assert run(installed, sys.executable, script, "--version") == f"kivi {kivi.__version__}\n"
    presets = run(installed, sys.executable, script, "spec", "list")
    for name in ("kivi-2bit", "kivi-4bit", "kivi-official", "kivi-paper", "teaching"):
        assert name in presets


def test_the_installed_reference_backend_quantizes(installed):
    code = """
import kivi, numpy as np
x = np.linspace(-1, 1, 4 * 2, dtype=np.float32).reshape(1, 1, 4, 2)
print(kivi.get_backend("reference").quantize(x, kivi.load_spec("teaching"), "key").codes().ravel().tolist())
"""
    # Groups of two tokens: the first is each group's minimum, the second its maximum.
    assert run(installed, sys.executable, "-c", code).strip() == "[0, 0, 3, 3, 0, 0, 3, 3]"
