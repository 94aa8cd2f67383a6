"""Laws of sign momentum: steps of one size, symmetry, scale, and random signs without bias."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_rounds import OuterRound, drawn, outer

from weft.methods.sign_momentum.runtime.signs import packed, unpacked

SEEDS = st.integers(0, 2**31)
some = settings(max_examples=15, deadline=None)
RATE, ETA, DECAY = 0.5, 0.25, 0.125
OPTIONS = {"outer_learning_rate": ETA, "beta1": 0.75, "beta2": 0.875, "weight_decay": DECAY}


def dyadic(seed: int, *shape: int) -> torch.Tensor:
    """Small multiples of a power of two, whose sums are exact."""
    numbers = torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(seed))
    return numbers / 64.0


@some
@given(SEEDS, st.integers(2, 4))
def test_with_one_plain_step_per_round_it_is_lion_on_the_mean_gradient(seed: int, replicas: int) -> None:
    """Chen et al., arXiv 2302.06675, algorithm 2; steps are compared where rounding decides no sign."""
    gradients = [drawn(seed + step, replicas, 30, dtype=torch.float64) for step in range(4)]
    weights = drawn(seed, 30, dtype=torch.float64)
    rounds = [OuterRound(RATE * one, RATE) for one in gradients]
    found = outer("sign-momentum", weights, rounds, **{**OPTIONS, "outer_learning_rate": 1.0})[0].weights
    momentum, clear = torch.zeros_like(weights), torch.ones(30, dtype=torch.bool)
    for step, gradient in enumerate(gradients):
        direction = 0.75 * momentum + 0.25 * gradient.mean(0)
        clear &= direction.abs() > 1e-9
        weights = weights - RATE * (direction.sign() + DECAY * weights)
        momentum = 0.875 * momentum + 0.125 * gradient.mean(0)
        assert torch.allclose(found[step][clear], weights[clear], rtol=0, atol=1e-12)
    assert clear.float().mean() > 0.9


@some
@given(SEEDS, st.sampled_from(["exact", "random"]))
def test_a_round_moves_a_weight_by_one_size_or_not_at_all(seed: int, sign: str) -> None:
    start = drawn(seed, 30)
    rounds = [OuterRound(drawn(seed + step, 2, 30), RATE) for step in range(3)]
    for one in rounds:
        one.moved[:, 3] = 0.0
    weights = outer("sign-momentum", start, rounds, **{**OPTIONS, "sign": sign})[0].weights
    for before, after in pairwise([start, *weights]):
        step = (after - (1 - ETA * RATE * DECAY) * before).abs()
        assert torch.allclose(step[torch.arange(30) != 3], torch.tensor(ETA * RATE), rtol=0, atol=1e-6)
        assert step[3] < 1e-6


@some
@given(SEEDS, st.sampled_from([4.0, 0.5]))
def test_the_size_of_all_pseudo_gradients_does_not_matter(seed: int, factor: float) -> None:
    start, moved = torch.zeros(30), [dyadic(seed + step, 2, 30) for step in range(3)]
    options = {**OPTIONS, "weight_decay": 0.0}
    found, other = (
        outer("sign-momentum", start, [OuterRound(size * one, RATE) for one in moved], **options)[0]
        for size in (1.0, factor)
    )
    assert torch.equal(found.weights, other.weights)
    assert torch.equal(factor * found.states["momentum/0"], other.states["momentum/0"])


@some
@given(SEEDS)
def test_opposite_rounds_take_opposite_steps(seed: int) -> None:
    moved = [dyadic(seed + step, 2, 30) for step in range(3)]
    found, other = (
        outer("sign-momentum", torch.zeros(30), [OuterRound(way * one, RATE) for one in moved], **OPTIONS)[0]
        for way in (1.0, -1.0)
    )
    assert torch.equal(found.weights, -other.weights)


def test_replicas_that_do_not_move_drift_by_one_size_a_round_and_stop_with_the_learning_rate() -> None:
    rates = [RATE, RATE, RATE / 2, 0.0, 0.0]
    rounds = [OuterRound(torch.ones(2, 8) * (step == 0), rate) for step, rate in enumerate(rates)]
    weights = outer("sign-momentum", torch.zeros(8), rounds, **{**OPTIONS, "weight_decay": 0.0})[0].weights
    steps = [(after - before)[0].item() for before, after in pairwise([torch.zeros(8), *weights])]
    assert steps == [-ETA * rate for rate in rates]


def test_a_weight_that_no_replica_moves_stays_where_three_shares_have_no_exact_sum() -> None:
    start = drawn(5, 64)
    rounds = [OuterRound(torch.zeros(3, 64), RATE)]
    found = outer("sign-momentum", start, rounds, **{**OPTIONS, "weight_decay": 0.0})
    assert torch.equal(found[0].weights[0], start)


@some
@given(SEEDS, st.sampled_from(["exact", "random"]), st.integers(2, 4))
def test_both_downloads_make_the_same_bits(seed: int, sign: str, replicas: int) -> None:
    rounds = [OuterRound(drawn(seed + step, replicas, 50), RATE) for step in range(3)]
    signs, weights = (
        outer("sign-momentum", drawn(seed, 50), rounds, **{**OPTIONS, "sign": sign, "download": download})[0]
        for download in ("signs", "weights")
    )
    assert torch.equal(signs.weights, weights.weights)


def test_random_signs_have_the_direction_as_their_mean() -> None:
    """Of each parameter, over its largest magnitude; a fixed seed draws the rounds."""
    number, way = 1000, drawn(3, 24)
    lengths, options = {"first": 9, "second": 15}, {**OPTIONS, "sign": "random", "beta1": 0.0}
    rounds = [OuterRound(way.expand(2, -1), RATE)] * number
    weights = outer(
        "sign-momentum", torch.zeros(24), rounds, lengths=lengths, **{**options, "weight_decay": 0.0}
    )[0].weights
    signs = -torch.diff(weights, dim=0, prepend=torch.zeros(1, 24)).sign()
    bounds = torch.cat([one.abs().max().expand(len(one)) for one in way.split([9, 15])])
    assert (signs.mean(0) - way / bounds).abs().max() < 5 / number**0.5


def test_random_signs_follow_their_parameter_and_not_its_place() -> None:
    ways = {"first": drawn(1, 21), "second": drawn(2, 40), "third": drawn(3, 5)}
    found = []
    for names in (["first", "second", "third"], ["third", "second", "first"], ["second"]):
        way = torch.cat([ways[name] for name in names])
        lengths = {name: len(ways[name]) for name in names}
        rounds = [OuterRound(way.expand(2, -1), RATE)] * 3
        weights = outer(
            "sign-momentum", torch.zeros(len(way)), rounds, lengths=lengths, **OPTIONS, sign="random"
        )[0].weights
        parts = weights.split(list(lengths.values()), dim=1)
        found.append(dict(zip(names, parts, strict=True))["second"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0, float("nan")]), min_size=4, max_size=64))
def test_packed_signs_come_back(values: list[float]) -> None:
    signs = torch.tensor(values[: len(values) // 4 * 4])
    given_bytes = packed(signs.clone())
    assert (given_bytes.dtype, len(given_bytes)) == (torch.uint8, len(signs) // 4)
    assert torch.equal(unpacked(given_bytes, torch.float32).nan_to_num(7.0), signs.nan_to_num(7.0))
