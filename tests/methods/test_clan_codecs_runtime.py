"""Laws of the codecs: bytes, bounds of errors, means, lattices, and numbers that are none."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.methods.clan.options import CODECS, ClanOptions
from weft.methods.clan.runtime.codecs import Draw, codec_of
from weft.sync.codecs.counter import Key

KEPT = {"top-k", "random-k"}


def options(codec: str, **changes: Any) -> ClanOptions:
    return ClanOptions.model_validate({"codec": codec, "block": 32, "ratio": 4.0, **changes})


def all_options() -> st.SearchStrategy[ClanOptions]:
    return st.builds(
        options,
        st.sampled_from(list(CODECS)),
        block=st.sampled_from([32, 64, 96]),
        bits=st.integers(2, 8),
        ratio=st.floats(1.0, 32.0),
        value_bits=st.sampled_from([16, 32]),
        errors=st.sampled_from(["kept", "dropped"]),
    )


def blocks_of(length: int, block: int, seed: int = 0) -> torch.Tensor:
    """Numbers in blocks, with zeros behind them."""
    numbers = torch.zeros(-(-length // block), block)
    numbers.view(-1)[:length] = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    return numbers


def draw(seed: int = 0, first: int = 0) -> Draw:
    return Draw(Key.of(seed, "own"), Key.of(seed, "common"), first)


def coded(
    table: ClanOptions, numbers: torch.Tensor, length: int | None = None, seed: int = 0
) -> torch.Tensor:
    """The decoded payload of blocks, zeros behind `length` elements."""
    codec, length = codec_of(table), numbers.numel() if length is None else length
    payload = torch.full((table.payload_bytes(len(numbers)),), 7, dtype=torch.uint8)
    codec.encode(numbers, length, payload, draw(seed))
    decoded = torch.full_like(numbers, torch.nan)
    codec.decode(payload, decoded, draw(seed))
    decoded.view(-1)[length:] = 0.0
    return decoded


def square(numbers: torch.Tensor) -> float:
    return numbers.double().square().sum().item()


@given(all_options(), st.integers(1, 200))
def test_numbers_of_any_length_are_decoded_to_numbers_no_larger_than_the_largest(
    table: ClanOptions, length: int
) -> None:
    numbers = blocks_of(length, table.block)
    decoded = coded(table, numbers, length)
    assert decoded.isfinite().all()
    factor = table.block / table.kept if table.codec == "random-k" and not table.keeps_errors else 1.0
    assert decoded.abs().max() <= factor * numbers.abs().max() * (1.0 + 2.0**-8)
    zeros = coded(table, torch.zeros_like(numbers), length)
    assert not zeros.any()


@given(
    all_options(),
    st.integers(1, 100),
    st.integers(0, 99),
    st.sampled_from([torch.inf, -torch.inf, torch.nan]),
)
def test_a_number_that_is_none_is_lost_nowhere(
    table: ClanOptions, length: int, place: int, number: float
) -> None:
    numbers = blocks_of(length, table.block)
    numbers.view(-1)[place % length] = number
    decoded = coded(table, numbers, length).isfinite().all(1)
    block = place % length // table.block
    assert [index for index, finite in enumerate(decoded.tolist()) if not finite] == [block]


@given(st.integers(1, 200), st.integers(0, 1000))
def test_scaled_signs_leave_out_what_the_identity_says(length: int, seed: int) -> None:
    numbers = blocks_of(length, 32, seed)
    decoded = coded(options("scaled-sign"), numbers, length)
    counts = [min(32, length - first) for first in range(0, length, 32)]
    left = sum(
        square(one) - one.double().abs().sum().item() ** 2 / count
        for one, count in zip(numbers, counts, strict=True)
    )
    assert square(numbers - decoded) == pytest.approx(left, rel=1e-5, abs=1e-6)
    assert torch.equal(decoded.view(-1)[:length] < 0, numbers.view(-1)[:length] < 0)


@given(
    st.lists(st.integers(-3, 3), min_size=32, max_size=128), st.floats(1.0, 32.0), st.sampled_from([16, 32])
)
def test_top_k_is_the_best_sparse_approximation_and_takes_equal_numbers_from_the_front(
    values: list[int], ratio: float, value_bits: int
) -> None:
    length = len(values) // 32 * 32
    numbers = torch.tensor(values[:length], dtype=torch.float32).view(-1, 32)
    table = options("top-k", ratio=ratio, value_bits=value_bits)
    decoded = coded(table, numbers)
    for given_, found in zip(numbers.tolist(), decoded.tolist(), strict=True):
        order = sorted(range(32), key=lambda index: (-abs(given_[index]), index))
        chosen = set(order[: table.kept])
        assert found == [one if index in chosen else 0.0 for index, one in enumerate(given_)]
    assert square(numbers - decoded) <= (1.0 - table.kept / 32) * square(numbers) + 1e-9


def test_indices_of_the_largest_blocks_fit_into_sixteen_bits() -> None:
    table = options("top-k", block=1 << 16, ratio=float(1 << 15))
    numbers = torch.zeros(1, 1 << 16)
    numbers[0, -1], numbers[0, 1 << 15] = 3.0, -2.0
    assert torch.equal(coded(table, numbers), numbers)


@given(st.integers(1, 32), st.integers(0, 500), st.integers(0, 5))
def test_random_numbers_are_those_of_the_same_indices_for_all_senders(
    kept: int, seed: int, first: int
) -> None:
    table = options("random-k", ratio=32 / kept)
    codec = codec_of(table)
    payloads = torch.zeros(3, table.payload_bytes(4), dtype=torch.uint8)
    numbers = [torch.randn(4, 32) for _ in payloads]
    common = Key.of(seed, "common")
    for sender, (one, payload) in enumerate(zip(numbers, payloads, strict=True)):
        codec.encode(one, one.numel(), payload, Draw(Key.of(sender, "own"), common, first))
    where = Draw(Key.of(9, "own"), common, first)
    ones = torch.zeros(4, 32)
    payload = torch.zeros(table.payload_bytes(4), dtype=torch.uint8)
    codec.encode(torch.ones(4, 32), 128, payload, where)
    codec.decode(payload, ones, where)
    assert ones.sum(1).tolist() == [table.kept] * 4
    total = torch.empty(4, 32)
    codec.decode_sum(payloads, total, where)
    torch.testing.assert_close(total, sum(numbers) * ones)


def test_random_places_leave_out_their_part_of_the_square_in_the_mean() -> None:
    table, numbers, blocks, seeds = options("random-k", errors="kept"), blocks_of(32, 32, 5), 2000, 2
    kept, count = table.kept / table.block, blocks * seeds
    # Each block of a piece has a shift of its own.
    each = torch.cat([coded(table, numbers.repeat(blocks, 1), seed=seed) for seed in range(seeds)])
    # Each place is sent with the probability k / b, as it is.
    assert torch.equal(each, torch.where(each != 0.0, numbers, 0.0))
    spread = 5.0 * sqrt(kept * (1.0 - kept) / count)
    assert ((each != 0.0).double().mean(0) - kept).abs().max() < spread
    left = (numbers - each).double().square().sum(1) / square(numbers)
    assert abs(left.mean().item() - (1.0 - kept)) < 5.0 * left.std().item() / sqrt(count)


@pytest.mark.parametrize(
    "table",
    [
        options("linear-dithering", bits=3),
        options("linear-dithering", bits=4),
        options("natural-dithering", bits=3),
        options("natural-dithering", bits=8),
        options("random-k", errors="dropped"),
    ],
    ids=lambda table: f"{table.codec} {table.bits}",
)
def test_codecs_without_errors_are_right_in_the_mean(table: ClanOptions) -> None:
    numbers, rounds = blocks_of(64, 32), 400
    found = torch.stack([coded(table, numbers, seed=seed) for seed in range(rounds)]).double()
    spread = found.std(0) / rounds**0.5
    assert ((found.mean(0) - numbers).abs() <= 5.0 * spread + 1e-6).all()


@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 1000))
def test_dithering_keeps_to_its_levels(bits: int, length: int, seed: int) -> None:
    numbers = blocks_of(length, 32, seed)
    most, levels = numbers.abs().amax(1, keepdim=True), (1 << (bits - 1)) - 1
    linear = coded(options("linear-dithering", bits=bits), numbers, length) / (most / levels)
    torch.testing.assert_close(linear, linear.round(), rtol=0.0, atol=1e-4)
    natural = coded(options("natural-dithering", bits=bits), numbers, length).abs() / most
    powers = natural[natural > 0].log2()
    assert torch.equal(powers, powers.round())
    assert ((1 - levels <= powers) & (powers <= 0)).all()


@given(all_options(), st.integers(0, 50))
def test_payloads_have_the_bytes_of_the_formula(table: ClanOptions, blocks: int) -> None:
    size, kept, values = table.block, max(1, int(table.block / table.ratio)), table.value_bits // 8
    bytes_ = {
        "scaled-sign": blocks * (size // 8 + 4),
        "top-k": blocks * kept * (2 + values),
        "random-k": blocks * kept * values,
        "linear-dithering": blocks * (size * table.bits // 8 + 4),
        "natural-dithering": blocks * (size * table.bits // 8 + 4),
        "fp16": blocks * size * 2,
        "fp32": blocks * size * 4,
    }
    assert table.payload_bytes(blocks) == 4 * -(-bytes_[table.codec] // 4)


@given(all_options(), st.integers(0, 3))
def test_a_piece_without_numbers_is_coded_wherever_its_rows_begin(table: ClanOptions, begin: int) -> None:
    """Replicas send rows of no bytes if a stage has no parameter that is large enough."""
    codec, numbers = codec_of(table), torch.zeros(0, table.block)
    assert table.payload_bytes(0) == 0
    payload = torch.zeros(4, dtype=torch.uint8)[begin:begin]
    codec.encode(numbers, 0, payload, draw())
    codec.decode(payload, numbers, draw())
    total = torch.zeros(0, table.block)
    codec.encode_sum(payload.view(1, 0).expand(3, 0), total, torch.zeros_like(total), 0, payload, draw())
