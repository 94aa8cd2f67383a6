"""Speeds of products and of attention by device, precision and length; laws and published figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.catalogue import catalogue, find_device
from weft.describe.layer import FP8_PRODUCT, PLAIN_PRODUCT
from weft.predict.cost.layer_times import FLASH_TOKENS, DataSheetSpeeds, length_factor

FLASH = st.sampled_from(["flash1", "flash1-causal", "flash2", "flash2-causal"])
# TFLOP/s by tokens of Triton's tutorial 06 with a causal mask: forward, and the first backward ones.
TRITON_FORWARD = {1024: 111.7, 2048: 136.5, 4096: 150.0, 8192: 160.4, 16384: 164.3}
TRITON_BACKWARD = {1024: 59.8, 2048: 76.2, 4096: 87.5}
# TFLOP/s of the best product found by mamf-finder (github.com/stas00/ml-engineering, compute/accelerator).
BEST_PRODUCTS = {
    ("a100-80gb", "bf16", PLAIN_PRODUCT): 271.2,
    ("h100-80gb", "bf16", PLAIN_PRODUCT): 794.5,
    ("h100-80gb", "bf16", FP8_PRODUCT): 1402.6,
    ("b200", "bf16", PLAIN_PRODUCT): 1745.0,
    ("mi300x", "bf16", PLAIN_PRODUCT): 668.4,
}


def reached(device: str, kernel: str, tokens: float = FLASH_TOKENS, precision: str = "bf16") -> float:
    """Operations per second of a very large product."""
    speeds = DataSheetSpeeds(find_device(device, "").device)
    return 1e18 / speeds.matmul_s(1e18, precision, kernel, tokens)


@pytest.mark.parametrize(("which", "teraflops"), BEST_PRODUCTS.items(), ids=str)
def test_large_products_reach_what_was_measured(which: tuple[str, str, str], teraflops: float) -> None:
    device, precision, kernel = which
    assert reached(device, kernel, precision=precision) == pytest.approx(teraflops * 1e12, rel=0.01)


def test_no_share_is_more_than_the_peak() -> None:
    for entry in catalogue().values():
        assert set(entry.matmul_shares) <= set(entry.device.flops_per_s)
        assert all(0.0 < share < 1.0 for share in (*entry.matmul_shares.values(), entry.flash_share / 1.01))


@given(kernel=FLASH, short=st.integers(1, 2**20), long=st.integers(1, 2**20))
def test_attention_on_longer_sequences_is_never_slower_per_operation(
    kernel: str, short: int, long: int
) -> None:
    low, high = sorted((short, long))
    assert length_factor(kernel, low) <= length_factor(kernel, high)
    assert length_factor(kernel, FLASH_TOKENS) == pytest.approx(1.0)
    assert length_factor(PLAIN_PRODUCT, short) == pytest.approx(1.0)


def test_causal_kernels_grow_with_length_as_published() -> None:
    """Between the growth of the forward and of the backward pass, within 10 %."""
    for tokens in (1024, 4096):
        forward, backward = (one[tokens] / one[FLASH_TOKENS] for one in (TRITON_FORWARD, TRITON_BACKWARD))
        low, high = sorted((forward, backward))
        assert low * 0.93 < length_factor("flash2-causal", tokens) < high * 1.1


def test_flash_attention_2_gains_little_from_hopper() -> None:
    ampere, hopper = (reached(name, "flash2") for name in ("a100-80gb", "h100-80gb"))
    peaks = 989.4 / 312
    assert hopper / ampere == pytest.approx(peaks * 0.35 / 0.73, rel=0.1)
    # Its share of Hopper's peak on long sequences: 35 % by FlashAttention-3's abstract.
    assert reached("h100-80gb", "flash2", 16384) / 989.4e12 < 0.35
