"""Laws of the quantiser, whatever path computes it."""

from __future__ import annotations

import math

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, smooth_, unsmooth_

KEY = Key.of(3, "laws")
quantisers = st.builds(
    Quantiser,
    bits=st.integers(2, 8),
    group=st.sampled_from([1, 7, 32, 128]),
    stochastic=st.booleans(),
)
seeds = st.integers(0, 2**32)


def heavy(length: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, length, generator=generator)
    return scale * normal[0] / normal[1:].square().mean(0).sqrt()


def encoded(quantiser: Quantiser, values: torch.Tensor, key: Key = KEY, first: int = 0) -> torch.Tensor:
    payload = torch.full((quantiser.payload_bytes(len(values)),), 255, dtype=torch.uint8)
    quantiser.encode(values, payload, key, first)
    return payload


def decoded(quantiser: Quantiser, payload: torch.Tensor, elements: int) -> torch.Tensor:
    values = torch.empty(elements)
    quantiser.decode(payload, values)
    return values


def through(quantiser: Quantiser, values: torch.Tensor, key: Key = KEY) -> torch.Tensor:
    return decoded(quantiser, encoded(quantiser, values, key), len(values))


def scales(quantiser: Quantiser, values: torch.Tensor) -> torch.Tensor:
    """The scale of each element."""
    stored = encoded(quantiser, values)[quantiser.code_bytes(len(values)) :].view(torch.float32)
    return stored.repeat_interleave(quantiser.group)[: len(values)]


@given(quantiser=quantisers, length=st.integers(0, 600))
def test_a_payload_has_the_bytes_of_the_formula(quantiser: Quantiser, length: int) -> None:
    codes = math.ceil(length * quantiser.bits / 8)
    expected = math.ceil(codes / 4) * 4 + 4 * math.ceil(length / quantiser.group)
    assert quantiser.payload_bytes(length) == expected
    assert through(quantiser, heavy(length, 0)).isfinite().all()


@given(quantiser=quantisers, length=st.integers(1, 600), seed=seeds, exponent=st.integers(-90, 90))
def test_an_element_moves_by_less_than_its_scale(
    quantiser: Quantiser, length: int, seed: int, exponent: int
) -> None:
    values = heavy(length, seed, 2.0**exponent)
    error = (through(quantiser, values) - values).abs()
    scale = scales(quantiser, values)
    most = scale if quantiser.stochastic else scale / 2
    # Ratio and product are rounded.
    assert (error <= most + 2.0**-22 * values.abs()).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_is_unbiased(bits: int) -> None:
    quantiser, values, draws = Quantiser(bits=bits, group=64), heavy(256, 1), 500
    mean = sum(through(quantiser, values, Key.of(seed)).double() for seed in range(draws)) / draws
    below = (values / scales(quantiser, values)).double() % 1
    deviation = scales(quantiser, values) * (below * (1 - below) / draws).sqrt()
    assert ((mean - values).abs() <= 5 * deviation + 1e-6 * values.abs()).all()


@given(quantiser=quantisers, seed=seeds, step=st.sampled_from([1.0, 0.75, 2.0**-60, 5 * 2.0**40]))
def test_numbers_of_the_lattice_are_exact(quantiser: Quantiser, seed: int, step: float) -> None:
    codes = torch.randint(
        -quantiser.levels,
        quantiser.levels + 1,
        (2 * quantiser.group,),
        generator=torch.Generator().manual_seed(seed),
    )
    codes[:: quantiser.group] = quantiser.levels
    assert torch.equal(through(quantiser, codes * step), codes * step)


def test_no_uniform_number_moves_a_number_of_the_lattice() -> None:
    quantiser, length = Quantiser(bits=8, group=1 << 20), 1 << 20
    codes = (torch.arange(length) % 128).float()
    assert torch.equal(through(quantiser, codes), codes)


@given(quantiser=quantisers, seed=seeds, exponent=st.integers(-60, 60))
def test_powers_of_two_pass_through(quantiser: Quantiser, seed: int, exponent: int) -> None:
    values, factor = heavy(300, seed), 2.0**exponent
    assert torch.equal(through(quantiser, factor * values), factor * through(quantiser, values))


@given(quantiser=quantisers, first=st.integers(0, 3), groups=st.integers(1, 3), start=st.integers(0, 2**40))
def test_a_part_has_the_codes_that_it_has_in_the_whole(
    quantiser: Quantiser, first: int, groups: int, start: int
) -> None:
    values, group = heavy(6 * quantiser.group, 2), quantiser.group
    part = slice(first * group, (first + groups) * group)
    whole = decoded(quantiser, encoded(quantiser, values, first=start), len(values))
    alone = encoded(quantiser, values[part].clone(), first=start + part.start)
    assert torch.equal(decoded(quantiser, alone, groups * group), whole[part])


@given(quantiser=quantisers, position=st.integers(0, 299))
def test_an_outlier_disturbs_its_own_group_only(quantiser: Quantiser, position: int) -> None:
    values = heavy(300, 4)
    plain = through(quantiser, values)
    values[position] = 1e6
    others = torch.arange(300) // quantiser.group != position // quantiser.group
    assert torch.equal(through(quantiser, values)[others], plain[others])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("smooth", [False, True])
def test_a_number_that_is_not_finite_makes_its_group_nan(value: float, bits: int, smooth: bool) -> None:
    quantiser, values = Quantiser(bits=bits, group=64, smooth=smooth), heavy(300, 5)
    plain = through(quantiser, values)
    values[130] = value
    found = through(quantiser, values)
    inside = torch.arange(300) // 64 == 2
    assert found[inside].isnan().all()
    assert torch.equal(found[~inside], plain[~inside])


def test_sums_that_overflow_make_their_group_nan() -> None:
    quantiser = Quantiser(bits=4, group=32, smooth=True)
    assert through(quantiser, torch.full((32,), 3e38)).isnan().all()
    assert through(quantiser, torch.full((32,), 1e300, dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, 2.0**-127])
def test_zeros_and_groups_of_subnormal_scale_become_zeros(value: float) -> None:
    quantiser = Quantiser(bits=4, group=32)
    assert torch.equal(through(quantiser, torch.full((40,), value)), torch.zeros(40))


@given(seed=seeds, blocks=st.integers(0, 4), rest=st.integers(0, 31))
def test_smoothing_multiplies_whole_blocks_by_the_matrix(seed: int, blocks: int, rest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-999, 999, (32 * blocks + rest,), generator=generator).float()
    matrix = torch.from_numpy(scipy.linalg.hadamard(32)).float()
    smoothed = values.clone()
    smooth_(smoothed)
    assert torch.equal(smoothed[: 32 * blocks].view(-1, 32), values[: 32 * blocks].view(-1, 32) @ matrix)
    assert torch.equal(smoothed[32 * blocks :], values[32 * blocks :])
    unsmooth_(smoothed)
    assert torch.equal(smoothed, values)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("length", [1, 31, 128, 300])
def test_smoothing_quantisers_encode_smoothed_values(bits: int, length: int) -> None:
    values = heavy(length, 6)
    kept, smoothed = values.clone(), values.clone()
    smooth_(smoothed)
    fused = encoded(Quantiser(bits=bits, group=128, smooth=True), values)
    assert torch.equal(fused, encoded(Quantiser(bits=bits, group=128), smoothed))
    assert torch.equal(values, kept)


@given(quantiser=quantisers, replicas=st.integers(1, 4), length=st.integers(1, 300))
def test_a_sum_of_payloads_is_that_of_their_numbers_in_order(
    quantiser: Quantiser, replicas: int, length: int
) -> None:
    payloads = torch.stack([encoded(quantiser, heavy(length, seed, 3.0**seed)) for seed in range(replicas)])
    total = torch.empty(length)
    quantiser.decode_sum(payloads, total)
    expected = torch.zeros(length)
    for payload in payloads:
        expected += decoded(quantiser, payload, length)
    assert torch.equal(total, expected)
    again = Quantiser(bits=4, group=96)
    payload = torch.empty(again.payload_bytes(length), dtype=torch.uint8)
    again.encode_sum(payloads, quantiser, length, payload, KEY, 17)
    assert torch.equal(payload, encoded(again, expected, first=17))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [4, 7])
def test_other_precisions_are_computed_in_fp32(kind: torch.dtype, bits: int) -> None:
    quantiser, values = Quantiser(bits=bits, group=32, smooth=True), heavy(200, 7).to(kind)
    payload = encoded(quantiser, values)
    assert torch.equal(payload, encoded(quantiser, values.float()))
    found = torch.empty_like(values)
    quantiser.decode(payload, found)
    assert torch.equal(found, decoded(quantiser, payload, 200).to(kind))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [4, 7])
def test_differences_are_taken_in_the_precision_of_the_weights(kind: torch.dtype, bits: int) -> None:
    quantiser, weights = Quantiser(bits=bits, group=128), heavy(300, 8).to(kind)
    target = weights.float() + heavy(300, 9, 1e-2)
    payload = torch.empty(quantiser.payload_bytes(300), dtype=torch.uint8)
    quantiser.encode_difference(target, weights, payload, KEY, 5)
    assert torch.equal(payload, encoded(quantiser, target.to(kind) - weights, first=5))


def relative_error(values: torch.Tensor, quantiser: Quantiser) -> float:
    found = through(quantiser, values)
    if quantiser.smooth:
        unsmooth_(found)
    return float((found - values).norm() / values.norm())


def test_errors_are_those_of_the_method() -> None:
    """Errors of one hop with groups of 128 as measured apart from this code; tails are hard to sample."""
    gaussian = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    plain, smooth = Quantiser(bits=4, group=128), Quantiser(bits=4, group=128, smooth=True)
    assert relative_error(gaussian, plain) == pytest.approx(0.166, rel=0.01)
    assert relative_error(gaussian, smooth) == pytest.approx(0.166, rel=0.01)
    assert relative_error(gaussian, Quantiser(bits=8, group=128)) == pytest.approx(0.009, rel=0.05)
    assert relative_error(heavy(1 << 18, 0), plain) == pytest.approx(0.305, rel=0.15)
    assert relative_error(heavy(1 << 18, 0), smooth) == pytest.approx(0.150, rel=0.15)


def error_of_two_levels(bits: int, smooth: bool, nodes: int = 4, ranks: int = 4) -> float:
    """The relative error of a sum: in a few bits inside nodes, then in 4 bits between them."""
    length, inside = 1 << 14, Quantiser(bits=bits, group=128, smooth=smooth)
    between = Quantiser(bits=4, group=128)
    gradients = [heavy(length, rank) for rank in range(nodes * ranks)]
    payloads = torch.stack(
        [encoded(inside, gradient, Key.of(0, rank)) for rank, gradient in enumerate(gradients)]
    )
    sums = torch.empty(nodes, between.payload_bytes(length), dtype=torch.uint8)
    for node, received in enumerate(payloads.view(nodes, ranks, -1)):
        between.encode_sum(received, inside, length, sums[node], Key.of(1, node))
    total, exact = torch.empty(length), torch.stack(gradients).sum(0)
    between.decode_sum(sums, total)
    if smooth:
        unsmooth_(total)
    return float((total - exact).norm() / exact.norm())


def test_two_levels_and_smoothing_each_make_the_error_smaller() -> None:
    """The transform is undone once, behind both levels; then the second one's error is all there is."""
    in_four, in_eight = error_of_two_levels(4, smooth=False), error_of_two_levels(8, smooth=False)
    smoothed = error_of_two_levels(8, smooth=True)
    assert in_four > 1.2 * in_eight > 1.2 * 1.2 * smoothed
    assert smoothed == pytest.approx(0.166, rel=0.05)


@pytest.mark.parametrize(
    ("bits", "group", "smooth"), [(1, 32, False), (9, 32, False), (4, 0, False), (4, 48, True)]
)
def test_bits_and_groups_out_of_range_are_refused(bits: int, group: int, smooth: bool) -> None:
    with pytest.raises(ValueError, match=r"bits|group"):
        Quantiser(bits=bits, group=group, smooth=smooth)


def test_tensors_of_another_form_are_refused() -> None:
    quantiser, values = Quantiser(bits=4, group=32), torch.zeros(64)
    payload = torch.zeros(quantiser.payload_bytes(64), dtype=torch.uint8)
    wrong = [
        (values, payload[:-4]),
        (values, payload.view(torch.int8)),
        (values, torch.zeros(len(payload) + 1, dtype=torch.uint8)[1:]),
        (torch.zeros(128)[::2], payload),
        (values.view(8, 8), payload),
        (values.long(), payload),
    ]
    for one, other in wrong:
        with pytest.raises(ValueError, match="of shape"):
            quantiser.encode(one, other, KEY)
    with pytest.raises(ValueError, match="float64"):
        quantiser.decode_sum(payload[None], values.double())
    with pytest.raises(ValueError, match="payload"):
        quantiser.decode_sum(payload[None, :-4], values)
    for one in (values.double(), values[::2], values.view(8, 8)):
        with pytest.raises(ValueError, match="of shape"):
            smooth_(one)
