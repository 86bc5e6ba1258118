"""`kivi demo`: what it asks for, and what it says where it cannot run. (What the demo measures: tests/model.)"""

import json

import pytest
from click.testing import CliRunner

from kivi.cli import cli


def invoke(*args: str):
    return CliRunner().invoke(cli, ("demo", *args))


def test_missing_weights_are_named(monkeypatch):
    pytest.importorskip("transformers", reason="without it, that is what is missing")
    monkeypatch.setattr("kivi.demo.model.PACKAGE", "no_such_package")
    result = invoke("--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "IntegrationError"
    assert "no_such_package" in error["message"]
    assert "make venv" in error["message"]


def test_steps_have_limits():
    assert invoke("--steps", "1").exit_code == 2


def test_options_and_json(monkeypatch, tmp_path):
    asked = {}

    class Result:
        def to_dict(self):
            return {"rows": [1, 2]}

    def run(backend, *, out, steps, json, progress):
        asked.update(backend=backend, out=out, steps=steps, json=json)
        progress("a stage", 1, 2)
        progress("a stage", 2, 2)
        return Result()

    monkeypatch.setattr("kivi.demo.run", run)
    result = invoke("--backend", "reference", "--steps", "7", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout) == {"rows": [1, 2]}
    assert asked == {"backend": "reference", "out": tmp_path, "steps": 7, "json": True}
