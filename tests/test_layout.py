"""Layouts: pack and unpack are inverse, words are where the digits say, and a bad digit string is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kivi
from kivi import layout
from kivi.errors import SpecError
from kivi.layout import Layout, arrangement, named_layout

BITS = (1, 2, 3, 4, 8)


@given(
    name=st.sampled_from(layout.layouts()),
    which=st.sampled_from(["key", "value"]),
    bits=st.sampled_from(BITS),
    tokens=st.integers(0, 70),
    channels=st.integers(1, 130),
    page=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_unpack_inverts_pack(name, which, bits, tokens, channels, page, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (2, tokens, channels), dtype=np.uint8)
    words = layout.pack(codes, named_layout(name), which, bits, page)
    assert words.dtype == named_layout(name).word
    assert np.array_equal(layout.unpack(words, named_layout(name), which, bits, page, tokens, channels), codes)


@pytest.mark.parametrize("name", layout.layouts())
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("bits", BITS)
def test_every_code_has_its_own_bits(name, which, bits):
    """Setting one code to all ones sets exactly `bits` bits, disjoint for all codes: a permutation, nothing more."""
    shape = arrangement(named_layout(name), which, bits, 32, 20)
    seen = np.zeros(shape.shape, np.uint64)
    for t in range(32):
        for c in range(20):
            codes = np.zeros((32, 20), np.uint8)
            codes[t, c] = (1 << bits) - 1
            words = shape.pack(codes).view(f"uint{shape.word_bits}").astype(np.uint64)
            assert int(np.bitwise_count(words).sum()) == bits
            assert not (seen & words).any()
            seen |= words


def test_official_words_by_hand():
    """Keys: sixteen tokens of one channel a word, first token lowest. Values: sixteen channels of one token a word."""
    codes = np.arange(32 * 32, dtype=np.uint32).reshape(32, 32).astype(np.uint8) % 4
    key = layout.pack(codes, named_layout("official_int32"), "key", 2, 32)
    value = layout.pack(codes, named_layout("official_int32"), "value", 2, 32)
    assert key.shape == value.shape == (32, 2)
    assert key.dtype == value.dtype == np.int32
    for i in range(32):
        for w in range(2):
            assert key.view(np.uint32)[i, w] == sum(int(codes[16 * w + j, i]) << 2 * j for j in range(16))
            assert value.view(np.uint32)[i, w] == sum(int(codes[i, 16 * w + j]) << 2 * j for j in range(16))


def test_three_bits_take_two_words_of_low_bits_and_one_of_high_bits():
    codes = (np.arange(32, dtype=np.uint8) * 5 % 8)[:, None]
    words = layout.pack(codes, named_layout("official_int32"), "key", 3, 32).view(np.uint32)
    assert words.shape == (1, 3)
    low, high = codes[:, 0] & 3, codes[:, 0] >> 2
    assert words[0, 0] == sum(int(low[j]) << 2 * j for j in range(16))
    assert words[0, 1] == sum(int(low[16 + j]) << 2 * j for j in range(16))
    assert words[0, 2] == sum(int(high[j]) << j for j in range(32))


def test_half_words_hold_far_channels():
    """hp16 at 2 bits, 64 channels: channel 8 j + h at bits 2 j of halfword h."""
    codes = np.zeros((1, 64), np.uint8)
    codes[0, 8 * 5 + 3] = 3
    words = layout.pack(codes, named_layout("hp16"), "key", 2, 1)
    assert words.shape == (1, 8)
    assert words[0, 3] == 3 << 10
    assert words.sum() == 3 << 10


def test_words_restart_at_each_page():
    codes = np.full((20, 1), 3, np.uint8)
    words = layout.pack(codes, named_layout("official_int32"), "key", 2, 8).view(np.uint32)
    assert words.tolist() == [[0xFFFF, 0xFFFF, 0xFF]]


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("t:slot t*", "t\\* and c\\*"),
        ("t:slot t* c* c*", "t\\* and c\\*"),
        ("t:slot c* t* t9", "one of them last"),
        ("t0 t0 t1 t2 c* t*", "twice"),
        ("t9 t0 t1 t2 c* t*", "leaves out bit t3"),
        ("t0 c* t*", "holds 16"),
        ("x:slot c* t*", "not a digit"),
        ("c^slot c^slot c* t*", "more than one"),
        ("c* c:slot t*", "first digits"),
    ],
)
def test_a_bad_digit_string_is_refused(key, word):
    with pytest.raises(SpecError, match=word):
        arrangement(Layout(name="bad", key=key, value="c:slot c* t*"), "key", 2, 32, 32)


def test_unknown_layout_lists_the_known_ones():
    with pytest.raises(SpecError, match="official_int32"):
        kivi.load_spec("kivi-2bit").override({"packing.layout": "nope"})
