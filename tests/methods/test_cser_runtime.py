"""Laws of CSER on flat weights: nothing is lost, errors and draws are common, known methods are settings."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from cser_rounds import CserOutcome, cser, drawn_updates, momentum_updates, on_one, part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_group import in_groups

from weft.errors import RunError
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.runtime.compressors import BlockCompressor, SignCompressor, TopKCompressor
from weft.methods.cser.runtime.meeting import Assembly, require_alike

SEEDS = st.integers(0, 2**31)
some = settings(max_examples=15, deadline=None)
few = settings(max_examples=6, deadline=None)
BLOCKED: dict[str, Any] = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 3, "block": 3}
FORMS: tuple[dict[str, Any], ...] = (
    BLOCKED,
    {**BLOCKED, "order": "shuffled"},
    {**BLOCKED, "keep_errors": True},
    {**BLOCKED, "variant": "code"},
    {"reset_ratio": 4.0, "every": 1, "block": 3},
    {"update_ratio": 4.0, "reset_ratio": 2.0, "every": 2, "compressor": "top-k"},
    {"compressor": "sign", "every": 2},
)
WITH_ERRORS = [one for one in FORMS if one.get("keep_errors") or "compressor" in one]


def start_of(length: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, length, dtype=torch.float64)


def close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-11) -> bool:
    return torch.allclose(one, other, rtol=0, atol=atol)


@some
@given(SEEDS, st.sampled_from(WITH_ERRORS), st.integers(2, 4), st.booleans(), st.booleans())
def test_weights_minus_errors_are_the_same_on_all_replicas(
    seed: int, options: dict[str, Any], replicas: int, momentum: bool, no_resets: bool
) -> None:
    updates = momentum_updates(seed, replicas, 60)() if momentum else drawn_updates(seed, replicas, 7, 60)[1]
    first, *others = cser(replicas, start_of(60), updates, 7, no_resets=no_resets, **options)
    for one in others:
        assert close(one.weights - one.errors, first.weights - first.errors)
        assert not torch.equal(one.weights, first.weights)


@some
@given(SEEDS, st.sampled_from(FORMS), st.sampled_from([(1, 1), (3, 1), (1, 2, 5)]))
def test_the_mean_of_the_weights_takes_every_update_once(
    seed: int, options: dict[str, Any], parts: tuple[int, ...]
) -> None:
    """Whatever the masks: no part of an update is dropped, and none counts twice."""
    shares = [one / sum(parts) for one in parts]
    moved, updates = drawn_updates(seed, len(parts), 7, 60)
    found = cser(len(parts), start_of(60), updates, 7, shares=shares, **options)
    mean = sum(share * one.weights for share, one in zip(shares, found, strict=True))
    whole = sum(share * one for share, one in zip(shares, moved, strict=True))
    assert close(mean, start_of(60) - whole.cumsum(0))


@some
@given(SEEDS, st.sampled_from(["blocks", "top-k", "sign"]), st.integers(2, 3))
def test_error_feedback_keeps_weights_equal_and_loses_nothing(
    seed: int, compressor: str, replicas: int
) -> None:
    moved, updates = drawn_updates(seed, replicas, 6, 60)
    options = {} if compressor == "sign" else {"ratio": 4.0}
    found = cser(
        replicas, start_of(60), updates, 6, variant="error-feedback", compressor=compressor, **options
    )
    assert all(torch.equal(one.weights, found[0].weights) for one in found)
    waiting = sum(one.errors for one in found) / replicas
    assert close(found[0].weights - waiting, start_of(60) - (moved.sum(0) / replicas).cumsum(0))
    if compressor == "blocks":
        for one in found:
            for errors, places in zip(one.errors, one.met, strict=True):
                assert not errors[places].any()


@some
@given(SEEDS, st.integers(2, 4), st.sampled_from(["paper", "code"]), st.booleans())
def test_ratios_of_one_are_synchronous_training(
    seed: int, replicas: int, variant: str, keep_errors: bool
) -> None:
    """Replicas that start equal step with the mean of the updates of their gradients."""
    options = {"update_ratio": 1.0, "reset_ratio": 1.0, "every": 2, "variant": variant}
    fresh = momentum_updates(seed, replicas, 40)
    keeps = {"keep_errors": True} if keep_errors and variant == "paper" else {}
    found = cser(replicas, start_of(40), fresh(), 6, **options, **keeps)
    updates, weights = fresh(), start_of(40)
    for step in range(6):
        weights = weights - sum(updates(one, step, weights) for one in range(replicas)) / replicas
        assert all(close(one.weights[step], weights) for one in found)


@some
@given(SEEDS, st.integers(2, 4), st.integers(1, 4), st.booleans())
def test_whole_resets_alone_are_local_steps(seed: int, replicas: int, every: int, keep_errors: bool) -> None:
    fresh = momentum_updates(seed, replicas, 40)
    options = {"reset_ratio": 1.0, "every": every, "keep_errors": keep_errors}
    found = cser(replicas, start_of(40), fresh(), 6, **options)
    updates, weights = fresh(), [start_of(40)] * replicas
    for step in range(6):
        weights = [one - updates(place, step, one) for place, one in enumerate(weights)]
        if (step + 1) % every == 0:
            weights = [sum(weights) / replicas] * replicas
        assert all(close(one.weights[step], mine) for one, mine in zip(found, weights, strict=True))


@some
@given(SEEDS, st.sampled_from([(8.0, 2.0, 3), (None, 4.0, 1), (None, 4.0, 3), (2.0, 1.0, 2)]))
def test_explicit_errors_and_averaged_blocks_are_the_same_method(
    seed: int, ratios: tuple[float | None, float, int]
) -> None:
    update, reset, every = ratios
    given = {} if update is None else {"update_ratio": update}
    options = {**given, "reset_ratio": reset, "every": every, "block": 3}
    fresh = momentum_updates(seed, 3, 50)
    plain, explicit = (
        cser(3, start_of(50), fresh(), 9, keep_errors=keeps, **options) for keeps in (False, True)
    )
    for one, other in zip(plain, explicit, strict=True):
        assert close(one.weights, other.weights)


@few
@given(SEEDS, st.integers(1, 3))
def test_without_updates_paper_and_code_agree_to_the_bit(seed: int, every: int) -> None:
    fresh = momentum_updates(seed, 3, 50)
    paper, code = (
        cser(3, start_of(50), fresh(), 7, variant=variant, reset_ratio=4.0, every=every, block=3)
        for variant in ("paper", "code")
    )
    assert all(torch.equal(one.weights, other.weights) for one, other in zip(paper, code, strict=True))


@some
@given(SEEDS, st.sampled_from(["paper", "code"]), st.sampled_from(["random", "shuffled"]))
def test_met_blocks_have_the_same_bits_after_a_reset(seed: int, variant: str, order: str) -> None:
    options = {**BLOCKED, "variant": variant, "order": order}
    first, *others = cser(3, start_of(60), drawn_updates(seed, 3, 6, 60)[1], 6, **options)
    for step in (2, 5):
        places = first.met[step]
        assert places is not None
        assert 0 < len(places) <= 33
        for one in others:
            assert torch.equal(one.weights[step][places], first.weights[step][places])
    explicit = cser(3, start_of(60), drawn_updates(seed, 3, 6, 60)[1], 6, keep_errors=True, **BLOCKED)
    for one in explicit:
        assert not one.errors[2][one.met[2]].any()


@some
@given(SEEDS, st.sampled_from([one for one in FORMS if "compressor" not in one]))
def test_one_replica_steps_as_if_it_were_alone_to_the_bit(seed: int, options: dict[str, Any]) -> None:
    fresh = momentum_updates(seed, 1, 40)
    [found] = cser(1, start_of(40), fresh(), 6, **options)
    updates, weights = fresh(), start_of(40)
    for step in range(6):
        weights = weights - updates(0, step, weights)
        assert torch.equal(found.weights[step], weights)


@some
@given(SEEDS, st.sampled_from(FORMS), st.integers(1, 6))
def test_a_replica_goes_on_from_its_tensors_to_the_bit(seed: int, options: dict[str, Any], stop: int) -> None:
    _, updates = drawn_updates(seed, 2, 7, 60)

    def stopped(group: Any) -> tuple[CserOutcome, CserOutcome]:
        former = part_of(start_of(60), **options)
        first = on_one(group, start_of(60), updates, range(stop), part=former, **options)
        part = part_of(former.flat, **options)
        for name, value in part.tensors().items():
            value.copy_(former.tensors()[name])
        return first, on_one(group, start_of(60), updates, range(stop, 7), part=part, **options)

    whole = cser(2, start_of(60), updates, 7, **options)
    for one, (first, second) in zip(whole, in_groups(2, stopped), strict=True):
        assert torch.equal(torch.cat([first.weights, second.weights]), one.weights)
        assert first.stalest + second.stalest == one.stalest


@some
@given(SEEDS, st.integers(2, 200), st.integers(1, 9), st.floats(1.0, 40.0), st.booleans())
def test_a_draw_keeps_distinct_blocks_that_no_other_draw_moves(
    seed: int, numbers: int, length: int, ratio: float, shuffled: bool
) -> None:
    blocks = Blocks(numbers, length)
    one, other = (BlockCompressor(blocks, ratio, shuffled, seed, "reset", "weight") for _ in range(2))
    torch.rand(3)
    torch.manual_seed(seed % 1000)
    for number in (5, 0, 5):
        chosen = one.chosen(number)
        again = other.chosen(number)
        assert torch.equal(chosen.numbers, again.numbers)
        assert chosen.mark == again.mark
        assert len(chosen.numbers.unique()) == len(chosen.numbers) == blocks.kept(ratio)
        assert set((chosen.places // length).tolist()) == set(chosen.numbers.tolist())
        assert len(chosen.places.unique()) == len(chosen.places)


def test_every_block_is_drawn_with_the_probability_of_the_ratio() -> None:
    """Chi-square with 39 degrees of freedom, below its 99.99 % quantile."""
    compressor = BlockCompressor(Blocks(120, 3), 8.0, False, 3, "update", "weight")
    counts = torch.zeros(40)
    for number in range(400):
        counts[compressor.chosen(number).numbers] += 1
    expected = 400 * 5 / 40
    assert counts.sum() == 400 * 5
    # Draws without replacement vary by the part of the blocks that stay.
    assert ((counts - expected) ** 2 / (expected * (1 - 1 / 8))).sum() < 80.0


@pytest.mark.parametrize(("reset", "every"), [(4.0, 1), (4.0, 3), (5.0, 2)])
def test_shuffled_blocks_wait_no_longer_than_ratio_times_interval(reset: float, every: int) -> None:
    options = {"reset_ratio": reset, "every": every, "block": 3, "order": "shuffled"}
    count = 20
    [one, _] = cser(2, start_of(60), drawn_updates(1, 2, 60, 60)[1], 60, **options)
    bound = ceil(count / round(count / reset)) * every
    # Between two resets the longest wait goes on.
    resets = one.stalest[every - 1 :: every]
    assert max(resets) <= bound - every
    assert max(one.stalest) == bound - 1 or every == 1


@some
@given(SEEDS, st.sampled_from([2.0, 4.0, 5.0, 10.0]))
def test_blocks_keep_their_part_of_the_energy(seed: int, ratio: float) -> None:
    """E |C(v) - v|^2 = (1 - 1/R) |v|^2, over all shuffled turns exactly."""
    compressor = BlockCompressor(Blocks(120, 3), ratio, True, seed, "update", "weight")
    vector = torch.randn(120, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    left = []
    for number in range(int(ratio)):
        rest = vector.clone()
        rest[compressor.chosen(number).places] = 0.0
        left.append(rest.square().sum() / vector.square().sum())
    assert sum(left) / len(left) == pytest.approx(1 - 1 / ratio, rel=1e-9)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize(
    ("options", "meetings"),
    [
        ({"update_ratio": 8.0, "reset_ratio": 2.0, "every": 4}, 8 / 8 + 2 / 2),
        ({"update_ratio": 8.0, "reset_ratio": 2.0, "every": 4, "variant": "code"}, 6 / 8 + 2 / 2),
        ({"reset_ratio": 4.0, "every": 1}, 8 / 4),
        ({"ratio": 16.0, "variant": "error-feedback"}, 8 / 16),
    ],
)
def test_a_replica_sends_two_halves_of_the_kept_blocks_and_heads(
    replicas: int, options: dict[str, Any], meetings: float
) -> None:
    """2 (n - 1) / n times 8 bytes for each kept number, and 2 numbers for each other replica."""
    length, steps = 640, 8
    _, updates = drawn_updates(1, replicas, steps, length)
    for one in cser(replicas, start_of(length), updates, steps, block=4, **options):
        count = sum(places is not None for places in one.met)
        count += 2 if {"update_ratio", "reset_ratio"} <= set(options) and "variant" not in options else 0
        payload = 2 * (replicas - 1) / replicas * 8 * length * meetings
        assert one.sent_bytes == payload + count * (replicas - 1) * 2 * 8


def test_larger_ratios_leave_replicas_further_apart() -> None:
    """On a fixed quadratic, of 20 replicas' seeds together."""
    apart = []
    for ratio in (1.0, 4.0, 16.0):
        total = 0.0
        for seed in range(6):
            fresh = momentum_updates(seed, 3, 64)
            found = cser(3, start_of(64), fresh(), 24, reset_ratio=ratio, every=2, block=2)
            last = torch.stack([one.weights[-8:] for one in found])
            total += (last - last.mean(0)).square().sum().item()
        apart.append(total)
    assert apart == sorted(apart)


@some
@given(SEEDS, st.sampled_from([one for one in FORMS if "compressor" not in one]))
def test_different_draws_are_told_and_average_nothing(seed: int, options: dict[str, Any]) -> None:
    _, updates = drawn_updates(seed, 3, 6, 60)

    def one(group: Any) -> CserOutcome:
        part = part_of(start_of(60), seed=8 if group.place == 1 else 7, **options)
        return on_one(group, start_of(60), updates, range(6), part=part, **options)

    found = in_groups(3, one)
    assert not any(one.alike for one in found)
    with pytest.raises(RunError, match="replicas chose different blocks"):
        require_alike(torch.tensor(False))


@some
@given(SEEDS, st.sampled_from(FORMS), st.sampled_from([float("nan"), float("inf")]))
def test_a_replica_that_is_not_finite_reaches_no_other(
    seed: int, options: dict[str, Any], broken: float
) -> None:
    moved, updates = drawn_updates(seed, 3, 3, 60)
    moved[1, 1, 7] = broken
    found = cser(3, start_of(60), updates, 3, **options)
    assert all(one.weights.isfinite().all() for one in (found[0], found[2]))
    restores = options.get("keep_errors") or "compressor" in options
    assert found[1].weights[1].isfinite().all() == bool(restores)


def test_a_lost_replica_gets_all_its_blocks_back_by_resets() -> None:
    moved, updates = drawn_updates(3, 2, 12, 60)
    moved[1, 1] = torch.nan
    moved[1, 2:] = 0.0
    options = {"reset_ratio": 4.0, "every": 1, "block": 3, "order": "shuffled"}
    found = cser(2, start_of(60), updates, 12, **options)
    lost = [int((~one.isfinite()).sum()) for one in found[1].weights]
    assert lost == [0, 45, 30, 15, *[0] * 8]


def test_top_k_keeps_the_largest_numbers_and_signs_their_mean_magnitude() -> None:
    vector = torch.tensor([0.5, -4.0, 1.0, 3.0, -0.25, 2.0, -1.0, 0.0])

    def met(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assembly = Assembly.of(group, 1.0, torch.tensor(True))
        return TopKCompressor(8, 4.0).meet(vector, 0, assembly).mean, SignCompressor().meet(
            vector, 0, assembly
        ).mean

    [(largest, signs)] = in_groups(1, met)
    assert largest.tolist() == [0.0, -4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert signs.abs().unique().tolist() == [vector.abs().mean().item()]
    assert torch.equal(signs < 0, vector < 0)
