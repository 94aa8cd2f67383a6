"""The compiled path has the bits of the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync.codecs.path_bits import (
    KINDS,
    LENGTHS,
    compare,
    compare_differences,
    compare_smoothing,
    mixed_numbers,
)

from weft.sync.codecs import compiled
from weft.sync.codecs.compiled import CompiledPath
from weft.sync.codecs.quantiser import Quantiser

groups = st.sampled_from([1, 7, 32, 96, 128, 2048, 3000])
lengths = st.sampled_from(LENGTHS) | st.integers(0, 3000)
firsts = st.integers(0, 2**63 - 10**6) | st.integers(2**32 - 3000, 2**32)


@given(
    bits=st.sampled_from([4, 8]) | st.integers(4, 8),
    group=groups,
    smooth=st.booleans(),
    stochastic=st.booleans(),
    length=lengths,
    seed=st.integers(0, 99),
    first=firsts,
)
def test_codes_sums_and_chains_are_the_same(
    bits: int, group: int, smooth: bool, stochastic: bool, length: int, seed: int, first: int
) -> None:
    # Codes of other bits fill whole bytes in eights.
    group = group if bits in (4, 8) else 8 * group
    form = Quantiser(bits=bits, group=group, smooth=smooth and group % 32 == 0, stochastic=stochastic)
    compare(CompiledPath(), form, mixed_numbers(length, seed), first)


@pytest.mark.parametrize("kind", KINDS)
def test_all_precisions_are_the_same(kind: torch.dtype) -> None:
    form, numbers = Quantiser(bits=4, group=128), mixed_numbers(1500, 1)
    compare(CompiledPath(), form, numbers.to(kind), 0)
    compare_differences(CompiledPath(), form, numbers, (numbers * 0.9).to(kind))


@given(length=lengths, seed=st.integers(0, 99))
def test_smoothed_numbers_are_the_same(length: int, seed: int) -> None:
    compare_smoothing(CompiledPath(), mixed_numbers(length, seed))


@pytest.mark.parametrize(("bits", "group"), [(4, 7), (4, 128), (8, 7), (8, 128), (5, 40)])
def test_chunks_join(bits: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CHUNK", 1)
    form = Quantiser(bits=bits, group=group)
    compare(CompiledPath(), form, mixed_numbers(1001, 2), 5, group_of_sums=24)
