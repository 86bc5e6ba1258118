"""The disk cache of generated kernels: found again, rebuilt when damaged or foreign, safe between processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from kivi import jit
from kivi.jit import Generated

KEY = {"backend": "test", "entry": "k", "options": [1, "a"]}
GENERATED = Generated("k", "def k(z, a): pass\n", {"z": "i32", "a": "*fp16"}, [[("batch", 1), ("heads", 1)], [("tokens", 32)], []], "ir")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    return tmp_path / "test"


def never():
    raise AssertionError("built a second time")


def test_an_entry_is_found_again_with_its_arguments_in_order(folder):
    first, source = jit.generated(KEY, lambda: GENERATED)
    second, again = jit.generated(KEY, never)
    assert first == second == GENERATED
    assert list(second.signature) == ["z", "a"]
    assert source == again
    assert source.read_text() == GENERATED.source


def test_another_request_is_another_entry(folder):
    jit.generated(KEY, lambda: GENERATED)
    other = Generated("k", "other\n", {}, [], "ir")
    assert jit.generated({**KEY, "options": [2, "a"]}, lambda: other)[0] == other
    assert jit.generated(KEY, never)[0] == GENERATED


def test_the_compilers_own_sources_are_part_of_the_key(folder, monkeypatch):
    jit.generated(KEY, lambda: GENERATED)
    monkeypatch.setattr(jit, "compiler_hash", lambda backend: "changed")
    with pytest.raises(AssertionError, match="second time"):
        jit.generated(KEY, never)


def damage_text(text):
    return text[: len(text) // 2]


def damage_body(text):
    return text.replace("def k", "def j")


def foreign(text):
    outer = json.loads(text)
    outer["body"] = outer["body"].replace('\\"a\\"', '\\"b\\"')
    return json.dumps(outer)


@pytest.mark.parametrize("damage", [damage_text, damage_body, foreign, lambda text: "", lambda text: "[]", lambda text: "{}"])
def test_a_damaged_or_foreign_entry_is_built_again(folder, damage):
    _, source = jit.generated(KEY, lambda: GENERATED)
    [entry] = folder.glob("*.json")
    entry.write_text(damage(entry.read_text()))
    source.write_text("damaged")
    assert jit.generated(KEY, lambda: GENERATED)[0] == GENERATED
    assert source.read_text() == GENERATED.source
    jit.generated(KEY, never)


def test_many_writers(folder):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: jit.generated({**KEY, "n": i % 2}, lambda: GENERATED)[0], range(64)))
    assert results == [GENERATED] * 64
    assert not list(folder.glob("*.part"))


def test_the_grid_is_data():
    assert GENERATED.programs({"batch": 2, "heads": 3, "tokens": 65}) == (6, 3, 1)


def test_the_folder_is_read_at_call_time(monkeypatch, tmp_path):
    monkeypatch.delenv("KIVI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_folder() == tmp_path / "kivi"
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "x"))
    assert jit.cache_folder() == tmp_path / "x"


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, caplog):
    """Kernels are made all the same, and a warning says where they are not kept."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "file" / "below"))
    jit._say_unwritable.cache_clear()
    for _ in range(2):
        made, source = jit.generated(KEY, lambda: GENERATED)
        assert made == GENERATED
        assert source.read_text("utf-8") == GENERATED.source
    assert [r.message for r in caplog.records if "KIVI_CACHE_DIR" in r.message] != []
    assert len(caplog.records) == 1


def test_a_user_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("KIVI_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jit.Path, "home", staticmethod(no_home))
    assert jit.cache_folder().is_dir()


def test_a_source_that_is_no_text_is_written_again(folder):
    _, source = jit.generated(KEY, lambda: GENERATED)
    source.write_bytes(b"\xff\xfe\x00")
    assert jit.generated(KEY, never) == (GENERATED, source)
    assert source.read_text("utf-8") == GENERATED.source


def test_no_room_left(folder, monkeypatch, caplog):
    """As for a folder that cannot be written: kernels are made all the same."""
    jit._say_unwritable.cache_clear()
    write = jit.Path.write_text

    def full(path, *arguments):
        if path.parent == folder:
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(jit.Path, "write_text", full)
    made, source = jit.generated(KEY, lambda: GENERATED)
    assert made == GENERATED
    assert source.parent != folder
    assert source.read_text("utf-8") == GENERATED.source
    assert "No space left on device" in caplog.text

    monkeypatch.setattr(jit.Path, "write_text", lambda path, *rest: full(folder / path.name))
    assert jit.generated({**KEY, "n": 1}, lambda: GENERATED)[0] == GENERATED  # nowhere at all


def test_a_folder_in_the_place_of_an_entry(folder):
    _, source = jit.generated(KEY, lambda: GENERATED)
    source.unlink()
    source.mkdir()
    made, elsewhere = jit.generated(KEY, never)
    assert made == GENERATED
    assert elsewhere.read_text("utf-8") == GENERATED.source
