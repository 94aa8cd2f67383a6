"""Packed codes: all bits, all codes, all lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, smooth_
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


@pytest.mark.parametrize("bits", [4, 5])
def test_no_number_is_read_back(bits: int) -> None:
    """A tensor without storage fails where the host asks for a number."""
    form, values = Quantiser(bits=bits, group=32, smooth=True), torch.empty(300, device="meta")
    payloads = torch.empty(2, form.payload_bytes(300), dtype=torch.uint8, device="meta")
    form.encode(values, payloads[0], Key.of(1))
    form.encode_sum(payloads, form, 300, payloads[1], Key.of(1))
    form.decode_sum(payloads, values)
    smooth_(values)
