"""A file with a good checksum and bad contents is refused: SPEC 10.4.2."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

import kivi
from kivi import storefile

CHANGES = {
    "a tensor is missing": (lambda t: t.pop("key.scale"), "'key.scale' is missing"),
    "a tensor is unknown": (lambda t: t.update(extra=np.zeros(3)), "'extra' is not part"),
    "a dtype is wrong": (lambda t: t.update({"key.scale": t["key.scale"].astype(np.float64)}), "ask for float32"),
    "a shape is wrong": (lambda t: t.update({"value.words": t["value.words"][:, :, :2].copy()}), "ask for uint8"),
    "more tokens than rows": (lambda t: t["tokens"].__setitem__(0, 90), "no cache of this spec reaches"),
    "values before keys": (lambda t: t["value_sealed"].__setitem__(0, 9), "no cache of this spec reaches"),
    "a negative count": (lambda t: t["key_sealed"].__setitem__(0, -4), "no cache of this spec reaches"),
    "a page out of range": (lambda t: t["table"].__setitem__((0, 1), 7), "page that the file does not hold"),
    "a request out of range": (lambda t: t["table"].__setitem__((1, 0), 5), "request or page"),
    "pages that leave a hole": (lambda t: t["table"].__setitem__((1, 2), 5), "do not cover"),
    "no request": (lambda t: t.update({name: t[name][:0].copy() for name in ("tokens", "key_sealed", "value_sealed")}), "holds no request"),
    "a page twice": (lambda t: t["table"].__setitem__((1, 1), 0), "belongs to no request"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_bad_contents_are_refused(what, tmp_path):
    change, words = CHANGES[what]
    cache = kivi.KVCache("teaching", batch=2, q_heads=1, kv_heads=1, head_dim=4, dtype="float32", backend="reference")
    x = np.arange(2 * 9 * 4, dtype=np.float32).reshape(2, 1, 9, 4)
    cache.attend(x, x, x, counts=[9, 0])
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    with safe_open(path, framework="np") as file:
        header, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    change(tensors)
    del header["sha256"]
    path.write_bytes(save(tensors, {**header, "sha256": storefile._checksum(tensors, header)}))
    with pytest.raises(kivi.errors.SaveFileError, match=words):
        kivi.KVCache.load(path)
