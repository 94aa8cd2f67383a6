"""Uniform numbers of elements: fixed for all time, evenly spread, different for each key."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.sync.codecs.counter import Key, uniforms

COUNT = 1 << 16


def hashed(key: Key, element: int) -> int:
    """The hash as its docstring states it, in whole numbers."""

    def mix(x: int, y: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32 ^ y
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    high, low = divmod(element, 2**32)
    return mix(low ^ key.low, mix((high + key.high) % 2**32, 0))


words = st.integers(0, 2**32 - 1)
keys = st.builds(Key, words, words)


@given(key=keys, first=st.integers(0, 2**63 - 100) | st.integers(2**32 - 40, 2**32))
def test_numbers_are_those_of_the_stated_hash(key: Key, first: int) -> None:
    expected = [(hashed(key, element) >> 8) / 2**24 for element in range(first, first + 40)]
    assert uniforms(key, first, 40, "cpu").tolist() == expected


def test_a_key_is_the_same_in_every_version() -> None:
    assert Key.of(7, 3, "gradient", 0) == Key(low=787148599, high=888161323)


def test_numbers_are_spread_evenly() -> None:
    numbers = uniforms(Key.of(0), 0, COUNT, "cpu").double()
    counts = torch.bincount((numbers * 256).long(), minlength=256).double()
    chi_squared = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum()
    # 255 degrees of freedom: mean 255, variance 510.
    assert abs(chi_squared - 255) < 5 * 510**0.5


def test_neighbours_and_neighbouring_keys_are_independent() -> None:
    one = uniforms(Key(5, 9), 0, COUNT, "cpu")
    others = [
        uniforms(Key(5, 9), 1, COUNT, "cpu"),
        uniforms(Key(5, 9), 32, COUNT, "cpu"),
        uniforms(Key(5, 9), 2**32, COUNT, "cpu"),
        uniforms(Key(4, 9), 0, COUNT, "cpu"),
        uniforms(Key(5, 8), 0, COUNT, "cpu"),
    ]
    correlations = torch.corrcoef(torch.stack([one, *others]))[0, 1:]
    assert (correlations.abs() < 5 / COUNT**0.5).all()


@given(element=words, bit=st.integers(0, 31))
def test_each_bit_of_an_element_changes_its_number(element: int, bit: int) -> None:
    key = Key.of(1)
    assert hashed(key, element) != hashed(key, element ^ 1 << bit)
