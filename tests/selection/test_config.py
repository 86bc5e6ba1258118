"""Who chooses: an argument before the environment, before the configuration file, before ranking. An explicit choice holds or raises."""

from __future__ import annotations

import pytest

import kivi
from kivi import config
from kivi.errors import BackendError, BackendUnavailableError, ConfigError, UnknownBackendError, UnsupportedError

SHAPE = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 64}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the configuration file, at its usual place or as KIVI_CONFIG names it."""

    def to(text, named=False):
        path = tmp_path / "named.toml" if named else tmp_path / "config" / "kivi" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if named:
            monkeypatch.setenv("KIVI_CONFIG", str(path))
        return path

    return to


def test_the_nearest_choice_wins(only, write, monkeypatch):
    only(a={"priority": 9}, b={}, c={}, d={})
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.source, chosen.reason) == (
        "a",
        "priority",
        "highest priority (9) of those that can serve the request",
    )
    path = write('backend = "b"')
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.source, chosen.reason) == ("b", "config", f"{path} says backend = 'b'")
    assert {r.name: (r.state, r.reason) for r in chosen.rejected} == dict.fromkeys("acd", ("not asked for", f"{path} says backend = 'b'"))
    monkeypatch.setenv("KIVI_BACKEND", "c")
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.source, chosen.reason) == ("c", "environment", "KIVI_BACKEND = 'c'")
    chosen = kivi.select("kivi-2bit", backend="d")
    assert (chosen.backend.name, chosen.source, chosen.reason) == ("d", "argument", "backend = 'd'")
    assert kivi.KVCache("kivi-2bit", backend="d", **SHAPE).ran.backend == "d"
    assert kivi.KVCache("kivi-2bit", **SHAPE).ran.backend == "c"
    for word in ("auto", ""):  # the nearest word is that there is no word, or none at all
        monkeypatch.setenv("KIVI_BACKEND", word)
        assert kivi.select("kivi-2bit").backend.name == ("a" if word else "b")


def test_modes_are_chosen_in_the_same_order(only, write, monkeypatch):
    only(a={"priority": 9}, b={"modes": ["device", "simulator", "interpreter"]})
    assert kivi.select("kivi-2bit").backend.mode == "device"
    write('mode = "simulator"')
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.backend.mode) == ("b", "simulator")
    assert kivi.get_backend("b").mode == "simulator"
    monkeypatch.setenv("KIVI_MODE", "interpreter")
    assert kivi.select("kivi-2bit").backend.mode == "interpreter"
    assert kivi.get_backend("b").mode == "interpreter"
    assert kivi.KVCache("kivi-2bit", backend="b", **SHAPE).ran.mode == "interpreter"
    assert kivi.select("kivi-2bit", mode="device").backend.mode == "device"
    assert kivi.get_backend("b", mode="device").mode == "device"
    # a choice of the environment holds for what is named, too, or raises: it is never ignored for one cache of a program
    with pytest.raises(UnsupportedError, match="KIVI_MODE = 'interpreter': backend 'a' has no mode 'interpreter'; it has device"):
        kivi.KVCache("kivi-2bit", backend="a", **SHAPE)


def test_only_devices_are_chosen_unasked(only):
    only(simulated={"priority": 99, "modes": ["simulator"]}, real={})
    chosen = kivi.select("kivi-2bit")
    assert chosen.backend.name == "real"
    assert chosen.rejected[0].state == "no such mode"
    only(simulated={"priority": 99, "modes": ["simulator"]})
    with pytest.raises(UnsupportedError, match="no backend can serve") as caught:
        kivi.select("kivi-2bit")
    assert caught.value.rejected[0].state == "no such mode"


def test_the_environment_is_read_when_a_choice_is_made(only, monkeypatch):
    only(a={"priority": 9}, b={})
    caches = [kivi.KVCache("kivi-2bit", **SHAPE)]
    monkeypatch.setenv("KIVI_BACKEND", "b")
    caches.append(kivi.KVCache("kivi-2bit", **SHAPE))
    monkeypatch.delenv("KIVI_BACKEND")
    caches.append(kivi.KVCache("kivi-2bit", **SHAPE))
    assert [c.ran.backend for c in caches] == ["a", "b", "a"]


@pytest.mark.parametrize("name", ["environment", "config", "argument"])
def test_a_choice_that_cannot_be_honoured_raises(only, write, monkeypatch, name):
    only(narrow={"bits": [4]}, able={"priority": 9})
    if name == "config":
        write('backend = "narrow"')
    if name == "environment":
        monkeypatch.setenv("KIVI_BACKEND", "narrow")
    with pytest.raises(UnsupportedError, match=r"narrow.*key\.bits = 2, it has 4"):
        kivi.select("kivi-2bit", backend="narrow" if name == "argument" else None)
    with pytest.raises(UnsupportedError, match=r"narrow.*key\.bits = 2, it has 4"):
        kivi.KVCache("kivi-2bit", backend="narrow" if name == "argument" else "auto", **SHAPE)


def test_unknown_names_say_what_there_is(only, write, monkeypatch):
    only(a={}, b={})
    write('backend = "typo"')
    with pytest.raises(UnknownBackendError, match="no backend is called 'typo'; installed are a, b"):
        kivi.select("kivi-2bit")
    monkeypatch.setenv("KIVI_BACKEND", "other")
    with pytest.raises(UnknownBackendError, match="'other'"):
        kivi.select("kivi-2bit")
    monkeypatch.setenv("KIVI_BACKEND", "a")
    monkeypatch.setenv("KIVI_MODE", "gpu")
    with pytest.raises(ConfigError, match="KIVI_MODE = 'gpu' is not a mode; the modes are device, interpreter, simulator, shim"):
        kivi.select("kivi-2bit")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('backend = "a', "not a valid configuration"),
        ("colour = 3", "colour"),
        ('mode = "gpu"', "gpu"),
        ("strict = 7", "strict"),
    ],
)
def test_a_bad_file_is_named(only, write, text, words):
    only(a={})
    path = write(text)
    with pytest.raises(ConfigError, match=words) as caught:
        kivi.select("kivi-2bit")
    assert str(path) in str(caught.value)
    assert "it may hold backend, mode, strict, self_check" in str(caught.value)


def test_a_file_that_is_named_must_be_there(only, write, monkeypatch, tmp_path):
    only(a={}, b={})
    write('backend = "b"', named=True)
    assert kivi.select("kivi-2bit").backend.name == "b"
    monkeypatch.setenv("KIVI_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"KIVI_CONFIG = .*nowhere\.toml' cannot be read: No such file"):
        kivi.select("kivi-2bit")


def test_strict_can_be_asked_for_everywhere(only, write, monkeypatch):
    only(narrow={"bits": [4], "priority": 9}, able={})
    assert kivi.select("kivi-2bit").backend.name == "able"
    with pytest.raises(UnsupportedError, match=r"strict: .*narrow.*key\.bits = 2"):
        kivi.select("kivi-2bit", strict=True)
    monkeypatch.setenv("KIVI_STRICT", "1")
    with pytest.raises(UnsupportedError, match="strict"):
        kivi.KVCache("kivi-2bit", **SHAPE)
    assert kivi.select("kivi-2bit", strict=False).backend.name == "able"
    monkeypatch.setenv("KIVI_STRICT", "0")
    write("strict = true")
    assert kivi.select("kivi-2bit").backend.name == "able"
    monkeypatch.delenv("KIVI_STRICT")
    with pytest.raises(UnsupportedError, match="strict") as caught:
        kivi.select("kivi-2bit")
    assert [r.name for r in caught.value.rejected] == ["narrow"]
    monkeypatch.setenv("KIVI_STRICT", "maybe")
    with pytest.raises(ConfigError, match="KIVI_STRICT = 'maybe' is neither on nor off"):
        kivi.select("kivi-2bit")


def test_unequal_bits_are_judged_for_each_side(only, caplog):
    """Report 42: a pair of key and value types that a backend does not have is a reason that is logged once, not a silent slow path."""
    only(pairs={"bits": [2, 4], "priority": 9}, all={})
    mixed = kivi.load_spec("kivi-2bit").override({"key.bits": 4, "value.bits": 3})
    with caplog.at_level("WARNING", "kivi"):
        caches = [kivi.KVCache(mixed, **SHAPE) for _ in range(3)]
    assert {c.ran.backend for c in caches} == {"all"}
    [warning] = [r.getMessage() for r in caplog.records]
    assert "backend 'pairs' (mode device) was passed over for 'all' on cpu: value.bits = 3, it has 2, 4" in warning
    with pytest.raises(UnsupportedError, match=r"pairs.*value\.bits = 3"):
        kivi.select(mixed, strict=True)
    served = kivi.load_spec("kivi-2bit").override({"key.bits": 4})
    assert kivi.select(served, strict=True).backend.name == "pairs"


def test_a_device_is_named_by_kind_or_exactly(only):
    only(a={})
    assert kivi.select("kivi-2bit", device="cpu").backend.device == "cpu"
    with pytest.raises(UnsupportedError, match="no device 'cpu:1', it has cpu"):
        kivi.select("kivi-2bit", device="cpu:1")
    with pytest.raises(UnsupportedError, match="it has no device 'cuda', it has cpu"):
        kivi.select("kivi-2bit", device="cuda")
    with pytest.raises(BackendUnavailableError, match="no device 'cuda:1', it has cpu"):
        kivi.get_backend("a", device="cuda:1")


def test_every_backend_has_its_reason(only):
    only(best={"priority": 3}, second={"priority": 2}, same={"priority": 2}, narrow={"bits": [4]}, simulated={"modes": ["simulator"]})
    chosen = kivi.select("kivi-2bit")
    assert {r.name: r.state for r in chosen.rejected} == {
        "second": "ranked behind", "same": "ranked behind", "narrow": "cannot serve", "simulated": "no such mode",
    }  # fmt: skip
    assert all(r.reason and r.fix for r in chosen.rejected)


def test_a_user_without_a_home_has_no_file(only, monkeypatch):
    def homeless(cls):
        raise RuntimeError("Could not determine home directory.")

    only(a={})
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(config.Path, "home", classmethod(homeless))
    assert config.config_path() is None
    assert config.read_config() == config.Config()
    assert kivi.select("kivi-2bit").source == "priority"
    monkeypatch.setenv("KIVI_BACKEND", "a")
    assert kivi.select("kivi-2bit").source == "environment"


def test_without_any_backend_it_says_what_is_wrong_with_the_installation(only):
    only()
    for choose in (lambda: kivi.select("kivi-2bit"), lambda: kivi.get_backend("reference")):
        with pytest.raises(BackendError, match="no folder of backends was found beside kivi, which must be installed unpacked"):
            choose()


def test_a_device_may_be_an_object_that_prints_as_one(only):
    class Device:
        def __str__(self):
            return "cpu"

    only(a={})
    for choose in (lambda d: kivi.get_backend("a", "device", d), lambda d: kivi.select("kivi-2bit", d).backend):
        assert choose(Device()).device == "cpu"
