"""What selection finds out about a machine without importing anything, and by children that may misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kivi import isolated, jit, machine, plugins, probing, records
from kivi.backend import DeviceInfo, Probe


@pytest.fixture
def fake_machine(tmp_path, monkeypatch):
    """Driver files in a folder of the test; nothing else is looked at."""
    monkeypatch.setattr(machine, "FILES", {"cuda": (str(tmp_path / "nvidiactl"),), "hip": (str(tmp_path / "kfd"),)})
    monkeypatch.setattr(machine, "LIBRARIES", {"cuda": "no-such-library.so.1", "hip": "no-such-library.so.2"})
    monkeypatch.setattr(machine, "NODES", dict.fromkeys(("cuda", "hip"), "no-such-node*"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


@pytest.fixture
def unloaded(monkeypatch):
    """Its driver is not loaded, whatever ran in this process before: so it is not asked here."""
    monkeypatch.delitem(sys.modules, "kivi.backends.numba_cuda.driver", raising=False)


def test_a_machine_without_a_driver(fake_machine, unloaded):
    assert machine.drivers() == {}
    assert not machine.may_have("cuda")
    assert machine.may_have("cpu")
    assert machine.may_have("npu")  # kinds that are not known are asked for
    found = probing.probe("numba_cuda", "device")
    assert (found.available, found.state) == (False, "no device")
    assert found.reason == "this machine has no driver for cuda devices (no no-such-library.so.1, no no-such-library.so.2)"


@pytest.mark.parametrize(("file", "state"), [(None, "no device"), ("nvidiactl", "unavailable")])
def test_a_driver_that_is_loaded_and_says_no(fake_machine, monkeypatch, file, state):
    """Only a machine that may have such a device leaves the question why."""
    if file is not None:
        (fake_machine / file).write_text("")
    answer = Probe(available=False, mode="device", reason="it sees none")
    monkeypatch.setitem(sys.modules, "kivi.backends.numba_cuda.driver", SimpleNamespace(probe=lambda mode, device: answer))
    monkeypatch.setattr(plugins, "missing_packages", lambda name, mode=None: [])
    found = probing.probe("numba_cuda", "device")
    assert (found.available, found.state, found.reason) == (False, state, "it sees none")


@pytest.mark.parametrize("file", ["nvidiactl", "kfd"])
def test_a_driver_is_seen_and_its_change_too(fake_machine, file):
    (fake_machine / file).write_text("")
    first = machine.drivers()
    assert machine.may_have("cuda")  # torch calls AMD's devices so, too
    assert machine.may_have("hip") == (file == "kfd")
    before = probing.facts("triton")
    os.utime(fake_machine / file, ns=(1, 1))
    assert machine.drivers() != first
    assert probing.facts("triton") != before


def test_elsewhere_than_on_linux_everything_is_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert list(machine.drivers()) == ["unknown"]
    assert machine.may_have("cuda")


def test_the_environment_is_part_of_what_an_answer_depends_on(monkeypatch):
    facts = probing.facts("cpu")
    for variable in ("CUDA_VISIBLE_DEVICES", "KIVI_CPU_TARGET"):
        monkeypatch.setenv(variable, "x86-64")
        assert probing.facts("cpu") != facts
        monkeypatch.delenv(variable)
    assert probing.facts("cpu") == facts


def test_records_hold_for_their_key_and_a_bad_one_for_an_hour():
    key = {"driver": 1}
    assert records.read("test", "a", key) is None
    records.write("test", "a", key, {"x": [1, 2]})
    records.write("test", "b", key, {"x": 3}, good=False)
    assert records.read("test", "a", key) == {"x": [1, 2]}
    assert records.read("test", "a", {"driver": 2}) is None
    now = records.time.time()
    assert records.read("test", "b", key, now + records.BAD_FOR - 1) == {"x": 3}
    assert records.read("test", "b", key, now + records.BAD_FOR + 1) is None
    assert records.read("test", "a", key, now + 1e9) == {"x": [1, 2]}
    records.forget("test", "a")
    assert records.read("test", "a", key) is None
    assert records.read("test", "b", key) == {"x": 3}


RECORD = '{"format": 1, "key": {}, "when": 0, "good": true, "data": %s}'


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"format": 1}', "\0", RECORD % "[]", RECORD % '"x"', RECORD % "null"])
def test_a_damaged_record_is_as_good_as_none(damage):
    records.write("test", "a", {}, {"x": 1})
    records.path_of("test", "a", {}).write_text(damage)
    assert records.read("test", "a", {}) is None
    records.write("test", "a", {}, {"x": 2})
    assert records.read("test", "a", {}) == {"x": 2}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    """This process remembers what it found out; it does not ask at every selection."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "file"))
    records.write("test", "a", {}, {"x": 1})
    assert records.read("test", "a", {}) == {"x": 1}
    records.forget("test", "other")
    assert records.read("test", "a", {}) == {"x": 1}
    records.forget("test")
    assert records.read("test", "a", {}) is None
    monkeypatch.delitem(sys.modules, "kivi.backends.numba_cuda.driver", raising=False)
    asked, probe = [], isolated.probe
    monkeypatch.setattr(isolated, "probe", lambda package, modes: asked.append(package) or probe(package, modes))
    for _ in range(2):
        assert probing.probe("numba_cuda", "simulator").available
    assert asked == ["kivi.backends.numba_cuda"]


def test_a_folder_in_place_of_a_record_is_as_good_as_none():
    path = records.path_of("test", "a", {})
    path.mkdir(parents=True)
    for number in (1, 2):
        assert records.read("test", "a", {}) is None
        records.write("test", "a", {}, {"x": number})
        assert records.read("test", "a", {}) == {"x": number}
        records.forget("test")
    assert records.all_of("test") == []


def test_a_record_that_cannot_be_deleted_is_forgotten_all_the_same(monkeypatch):
    def refuse(self, missing_ok=False):
        raise PermissionError(30, "Read-only file system", os.fspath(self))

    records.write("test", "a", {}, {"x": 1})
    with monkeypatch.context() as context:
        context.setattr(records.Path, "unlink", refuse)
        for _ in range(2):
            records.forget("test", "a")
            assert records.read("test", "a", {}) is None
    records.write("test", "a", {}, {"x": 2})
    assert records.read("test", "a", {}) == {"x": 2}


def test_a_stamp_of_a_folder_whose_name_is_no_text(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (folder / "a.py").write_text("")
    first = records.stamp(folder)
    (folder / "a.py").write_text("x")
    assert records.stamp(folder) != first


def test_a_child_executes_no_file_of_the_current_folder(tmp_path, monkeypatch):
    """A module of the same name as one of the interpreter's lies there, as it may in anyone's folder of scripts."""
    for name in ("json", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert isolated.probe("kivi.backends.reference", ["device"])["device"].available
    assert not (tmp_path / "executed").exists()


def test_what_is_no_text_on_the_path_is_passed_over(monkeypatch, tmp_path):
    """As imports pass over it. A name that is no UTF-8 is text all the same."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "driver.py").write_text("")
    monkeypatch.setattr(sys, "path", [tmp_path, os.fsdecode(b"/nowhere/caf\xe9"), *sys.path])
    assert isolated.probe("kivi.backends.reference", ["device"])["device"].available
    with pytest.raises(isolated.NoAnswer, match="No module named 'hidden'"):
        isolated.probe("hidden", ["device"])


def test_a_probe_of_another_release_is_asked_again(unloaded):
    first = probing.probe("numba_cuda", "simulator")
    [path] = (jit.cache_folder() / "probes").glob("numba_cuda-*.json")
    data = json.loads(path.read_text())
    data["data"]["simulator"] = {"available": "perhaps"}
    path.write_text(json.dumps(data))
    assert probing.probe("numba_cuda", "simulator") == first


@pytest.mark.parametrize("hindrance", ["frozen", "application", "forbidden"])
def test_where_no_child_can_be_started_this_process_asks(monkeypatch, hindrance):
    if hindrance == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif hindrance == "application":
        monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    else:

        def refuse(*args, **kwargs):
            raise PermissionError("fork is not allowed here")

        monkeypatch.setattr(isolated.subprocess, "Popen", refuse)
    for name in [name for name in sys.modules if name == "kivi.backends.numba_cuda.driver"]:
        monkeypatch.delitem(sys.modules, name)
    assert probing.probe("numba_cuda", "simulator").available
    [case] = isolated.check("kivi.backends.reference", "device", "cpu", ["quantize/ties.middle.b2.float16.key"])
    assert case == {"id": "quantize/ties.middle.b2.float16.key", "status": "passed", "reason": ""}


def test_a_child_that_starts_others_is_ended_with_them(tmp_path, monkeypatch):
    """The package starts a process that holds the pipes open, and hangs."""
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "__init__.py").write_text("")
    code = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)\n"
    (tmp_path / "hangs" / "driver.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(isolated, "PROBE_SECONDS", 2.0)
    with pytest.raises(isolated.NoAnswer, match="did not answer within 2 seconds, and was stopped"):
        isolated.probe("hangs", ["device"])


def test_a_device_reads_as_its_facts():
    assert str(DeviceInfo(device="cpu")) == "cpu"
    assert str(DeviceInfo(device="cuda:0", name="H200", capability="9.0")) == "cuda:0 (H200, capability 9.0)"


def test_importing_the_child_imports_no_backend():
    code = "import sys, kivi.isolated; print([n for n in sys.modules if n.startswith('kivi.backends') or n.startswith('kivi.conformance')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
