"""`kivi select`, `kivi tune`, `kivi doctor`, and what `kivi backends` says of conformance and rates."""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner

import kivi
from kivi import plugins, results
from kivi.cli import cli

SMALL = ("--head-dim", "16", "--q-heads", "4", "--kv-heads", "2", "--tokens", "64", "--dtype", "float32")


def run(*args, code=0):
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == code, done.output
    return done


def data(*args, code=0):
    return json.loads(run(*args, "--json", code=code).stdout)


def table(text):
    """First word of a row -> the row, continued lines joined."""
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("  ") and line.strip():
            name = line.split()[0] if line[2] != " " else list(rows)[-1]
            rows[name] = f"{rows.get(name, '')} {' '.join(line.split())}".strip()
    return rows


def test_select_says_what_and_why():
    chosen = kivi.select("kivi-2bit")
    best = chosen.backend
    assert run("select").stdout == f"{best.name} (mode {best.mode}, {best.device}): {chosen.reason}\n"
    rows = table(run("select", "--explain").stdout)
    assert set(rows) == {"backend", *plugins.found()}
    assert rows[best.name].startswith(f"{best.name} chosen {best.mode} {best.device}")
    for rejected in chosen.rejected:
        assert rows[rejected.name].startswith(f"{rejected.name} {rejected.state} ")
        assert f"{rejected.reason}; {rejected.fix}" in rows[rejected.name]


def test_select_as_json():
    out = data("select", "--tokens", "100", "--batch", "3")
    best = out["backend"]
    assert (best, out["mode"], out["source"]) == (kivi.select("kivi-2bit").backend.name, "device", "priority")
    assert out["request"]["tokens"] == 100
    assert out["bucket"] == {"tokens": 128, "group": 4, "head_dim": 128, "value_head_dim": 128, "batch": 4, "dtype": "float16"}
    assert {r["name"] for r in out["rejected"]} == set(plugins.found()) - {best}
    assert all(r["reason"] and r["state"] and r["fix"] for r in out["rejected"])


def test_select_fails_with_all_reasons(monkeypatch):
    done = run("select", "--device", "cuda:7", "--explain", code=2)
    rows = table(done.stdout)
    assert set(rows) == {"backend", *plugins.found()}
    assert "it has no device 'cuda:7', it has cpu" in rows["reference"]
    assert "no backend can serve spec 'kivi-2bit'" in done.stderr
    assert data("select", "--backend", "nosuch", code=2)["error"]["type"] == "UnknownBackendError"
    monkeypatch.setenv("KIVI_STRICT", "perhaps")
    assert data("select", code=2)["error"]["type"] == "ConfigError"


def test_tune_ranks_what_it_measured(monkeypatch):
    found = {name: plugins.get(name) for name in ("reference",)}
    monkeypatch.setattr(plugins, "found", lambda: found)
    out = data("tune", *SMALL, "--rounds", "2")
    assert out["bucket"]["tokens"] == 128
    assert (out["spec"], out["tokens"]) == ("kivi-2bit", 64)
    [one] = out["measured"]
    assert (one["backend"], one["mode"], one["device"], one["rounds"]) == ("reference", "device", "cpu", 2)
    assert one["seconds"] > 0
    text = run("tune", *SMALL, "--rounds", "1").stdout
    assert table(text)["reference"].split()[:3] == ["reference", "device", "cpu"]
    assert "kept for tokens 0-128, Hq/Hkv 2, D 16, batch 1, float32" in text
    [listed] = data("backends")
    assert listed["seconds"] > 0
    assert "rates: kivi-2bit, 64 tokens, tokens 0-128" in run("backends").stdout


def test_doctor_tells_all(monkeypatch, tmp_path):
    found = {name: plugins.get(name) for name in ("reference", "cupy")}
    monkeypatch.setattr(plugins, "found", lambda: found)
    config = tmp_path / "config" / "kivi" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('backend = "reference"\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    out = data("doctor")
    assert out["config"] == {"path": str(config), "exists": True, "text": 'backend = "reference"\n'}
    assert out["environment"]["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert out["environment"]["KIVI_CACHE_DIR"] == out["cache_folder"]["path"]
    assert out["cache_folder"]["writable"]
    assert out["versions"]["kivi-kvcache"]
    assert {b["name"] for b in out["backends"]} == {"reference", "cupy"}
    assert out["self_checks"] == []  # the reference needs none
    text = run("doctor").stdout
    for word in ("python:", "platform:", "processor:", "drivers:", 'backend = "reference"', "CUDA_VISIBLE_DEVICES=1,2", "cache folder:"):
        assert word in text


def test_conformance_of_this_machine_is_shown():
    run("conform", "--backend", "reference", "--profile", "quantize", "--case", "quantize/ties.middle.*")
    assert not results.local_folder().exists()  # a part says nothing
    [before] = [b for b in data("backends") if b["name"] == "reference"]
    assert before["conformance"]["here"] is False
    run("conform", "--backend", "reference", "--profile", "quantize")
    [after] = [b for b in data("backends") if b["name"] == "reference"]
    assert after["conformance"]["here"] is True
    assert after["conformance"]["profiles"]["quantize"]["failed"] == 0
    assert after["conformance"]["text"].startswith("quantize quick: ")


def test_backends_can_be_asked_anew(monkeypatch):
    from kivi import isolated

    asked, probe = [], isolated.probe
    monkeypatch.setattr(isolated, "probe", lambda package, modes: asked.append(package) or probe(package, modes))
    found = {name: plugins.get(name) for name in ("numba_cuda",)}
    monkeypatch.setattr(plugins, "found", lambda: found)
    monkeypatch.delitem(sys.modules, "kivi.backends.numba_cuda.driver", raising=False)
    for args, times in ((("backends",), 1), (("backends",), 1), (("backends", "--refresh"), 2)):
        run(*args)
        assert asked == ["kivi.backends.numba_cuda"] * times
