"""Packed codes: all bits, all codes, all lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.sync.codecs.reference import pack, unpack


@given(data=st.data(), bits=st.integers(2, 8))
def test_packed_codes_come_back(data: st.DataObject, bits: int) -> None:
    code = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = torch.tensor(data.draw(st.lists(code, max_size=40)), dtype=torch.int64)
    length = 4 * -(-len(codes) * bits // 32)
    packed = pack(codes, bits, length)
    assert packed.shape == (length,)
    assert torch.equal(unpack(packed, bits, len(codes)), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_comes_back(bits: int) -> None:
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    assert torch.equal(unpack(pack(codes, bits, 4 * len(codes)), bits, len(codes)), codes)


def test_the_first_code_has_the_highest_bits() -> None:
    assert pack(torch.tensor([1, -2, 7]), 4, 4).tolist() == [0x1E, 0x70, 0, 0]
    assert pack(torch.tensor([-128, 127]), 8, 4).tolist() == [0x80, 0x7F, 0, 0]
    assert pack(torch.tensor([1, 2, 3]), 3, 4).tolist() == [0b00101001, 0b10000000, 0, 0]
