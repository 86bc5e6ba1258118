"""Asking a backend's driver in a process of its own.

A vendor's package may hang, crash the process, print, or leave a device in a bad state. None of this may happen to a process that only
wants to know which backend to take, so the question goes to a child that imports the driver, answers in JSON, and ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kivi.backend import Probe, read_manifest

#: Seconds after which a child is given up: a first import of a large package from a slow disk takes its time.
PROBE_SECONDS = 120.0
CHECK_SECONDS = 600.0

# Until `sys.path` is the parent's, nothing but the interpreter's own modules may be found: -P leaves the current folder out.
_CHILD = "import json, sys; q = json.load(sys.stdin); sys.path[:] = q['path']; from kivi.isolated import _answer; _answer(q)"


class NoAnswer(Exception):
    """The child hung, died, or raised; the message says which."""


class NoChild(Exception):
    """This process cannot start a child: whoever asks has to ask in this process."""


def probe(package: str, modes: Sequence[str]) -> dict[str, Probe]:
    """Mode -> what the driver of `package` says. Raises `NoAnswer`, `NoChild`."""
    answer = _ask({"ask": "probe", "package": package, "modes": list(modes)}, PROBE_SECONDS)
    return msgspec.convert(answer, dict[str, Probe])


def check(package: str, mode: str, device: str, cases: Sequence[str]) -> list[dict[str, str]]:
    """What conformance cases say on a device: id, status and reason of each. Raises `NoAnswer`.

    Where no child can be started, they run in this process.
    """
    question = {"package": package, "mode": mode, "device": device, "cases": list(cases)}
    try:
        return _ask({"ask": "check", **question}, CHECK_SECONDS)
    except NoChild:
        try:
            return _checks(question)
        except Exception as error:  # a vendor's package can fail in any way
            raise NoAnswer(f"{type(error).__name__}: {error}") from None


def probe_driver(driver: Any, mode: str) -> Probe:
    """What a driver module says of a mode. Whatever it raises is the answer."""
    try:
        found = driver.probe(mode, "auto")
        if not isinstance(found, Probe):
            raise TypeError(f"probe() returned {'None' if found is None else f'a {type(found).__name__}'}, not a kivi.backend.Probe")
        try:
            return msgspec.convert(msgspec.to_builtins(found, enc_hook=str), Probe)
        except msgspec.ValidationError as error:
            raise TypeError(f"probe() returned a kivi.backend.Probe with a field of the wrong type: {error}") from None
    except (Exception, SystemExit) as error:  # a vendor's package can fail in any way
        return Probe(available=False, mode=mode, reason=f"{type(error).__name__}: {error}", state="broken")


def _ask(question: dict[str, Any], seconds: float) -> Any:
    token = uuid.uuid4().hex
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.lower().startswith(("python", "pypy")):
        raise NoChild(f"{sys.executable!r} is an application, not an interpreter that could be started again")
    try:
        child = subprocess.Popen(
            [sys.executable, "-I" if sys.flags.isolated else "-P", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NoChild(str(error)) from error
    path = [entry for entry in sys.path if isinstance(entry, str)]  # an import passes over anything else
    try:
        out, err = child.communicate(json.dumps({**question, "token": token, "path": path}), timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(child)
        raise NoAnswer(f"it did not answer within {seconds:g} seconds, and was stopped") from None
    except BaseException:
        _kill(child)
        raise
    # The package may print whatever it likes, so the answer is the one line that begins with a word it cannot know.
    lines = [line for line in out.splitlines() if line.startswith(token)]
    if not lines:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "no message")
        died = f"signal {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise NoAnswer(f"its process ended with {died}: {last}")
    try:
        answer = json.loads(lines[-1].removeprefix(token))
    except ValueError:  # something else was printed into it
        raise NoAnswer(f"its answer cannot be read: {lines[-1].removeprefix(token)[:200]!r}") from None
    if "error" in answer:
        raise NoAnswer(answer["error"])
    return answer["ok"]


def _kill(child: subprocess.Popen[str]) -> None:
    """End the child and whatever it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # no process groups here, or it is gone
        child.kill()
    child.communicate()


def _answer(question: dict[str, Any]) -> None:
    """The child's side."""
    answers = {"probe": _probes, "check": _checks}
    try:
        answer = {"ok": answers[question["ask"]](question)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    print(f"\n{question['token']}{json.dumps(answer)}", flush=True)  # noqa: T201
    os._exit(0)  # what a package does at exit is not of interest, and may hang


def _probes(question: dict[str, Any]) -> dict[str, Any]:
    driver = importlib.import_module(f"{question['package']}.driver")
    return {mode: msgspec.to_builtins(probe_driver(driver, mode)) for mode in question["modes"]}


def _checks(question: dict[str, Any]) -> list[dict[str, str]]:
    from kivi.plugins import conformance_runner, create

    package = question["package"]
    manifest = read_manifest((resources.files(package) / "backend.toml").read_text("utf-8"), package)
    backend = create(importlib.import_module(f"{package}.driver"), manifest, question["mode"], question["device"])
    report = conformance_runner()(backend, cases=question["cases"], xfails=[])
    return [{"id": case.id, "status": case.status, "reason": case.reason} for case in report.cases]
