"""Laws of outer steps: all replicas get the same bits, and only the mean and the last weights decide them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_rounds import METHODS, OuterRound, drawn, outer

SEEDS = st.integers(0, 2**31)
some = settings(max_examples=15, deadline=None)


def rounds_of(seed: int, replicas: int, length: int, number: int = 3) -> list[OuterRound]:
    return [OuterRound(drawn(seed + step, replicas, length)) for step in range(number)]


@some
@given(SEEDS, st.sampled_from(METHODS), st.integers(2, 4), st.integers(1, 70))
def test_all_replicas_have_the_same_bits_after_every_meeting(
    seed: int, method: str, replicas: int, length: int
) -> None:
    first, *others = outer(method, drawn(seed, length), rounds_of(seed + 9, replicas, length))
    assert first.weights.isfinite().all()
    assert all(torch.equal(one.weights, first.weights) for one in others)


@some
@given(SEEDS, st.sampled_from(METHODS), st.permutations(range(5)))
def test_neither_the_number_of_slices_nor_the_order_of_tensors_changes_a_bit(
    seed: int, method: str, order: list[int]
) -> None:
    """Replicas without a share of the batch own slices, too."""
    sizes = [3, 40, 17, 1, 9]
    length, start, rounds = sum(sizes), drawn(seed, sum(sizes)), rounds_of(seed + 9, 2, sum(sizes))
    expected = outer(method, start, rounds)[0].weights
    places = [torch.arange(length).split(sizes)[index] for index in order]
    place = torch.cat(places)
    without = [OuterRound(torch.cat([one.moved, one.moved])[:, place], one.rate) for one in rounds]
    found = outer(method, start[place], without, shares=[0.5, 0.5, 0.0, 0.0])[3].weights
    assert torch.equal(found, expected[:, place])


@some
@given(SEEDS, st.sampled_from([("slow-momentum", 0.0, 1.0), ("diloco", 0.0, 1.0)]))
def test_without_momentum_an_outer_step_goes_to_the_mean(seed: int, method: tuple[str, float, float]) -> None:
    word, momentum, rate = method
    start, rounds = (
        drawn(seed, 33).double(),
        [OuterRound(one.moved.double()) for one in rounds_of(seed + 9, 3, 33)],
    )
    options = {"outer_momentum": momentum, "outer_learning_rate": rate}
    expected = outer("local-averaging", start, rounds)[0].weights
    assert torch.allclose(outer(word, start, rounds, **options)[0].weights, expected, rtol=0, atol=1e-13)


@some
@given(SEEDS, st.sampled_from(METHODS), st.sampled_from([float("nan"), float("inf")]))
def test_a_replica_that_is_not_finite_is_overwritten_by_the_others(
    seed: int, method: str, broken: float
) -> None:
    """The others' shares fill the mean, as if there were no other."""
    start, rounds = drawn(seed, 40), rounds_of(seed + 9, 3, 40, 2)
    rounds[0].moved[1, 7] = broken
    found = outer(method, start, rounds[:1], shares=[0.5, 0.25, 0.25])
    others = [OuterRound(rounds[0].moved[[0, 2]])]
    expected = outer(method, start, others, shares=[0.5 / 0.75, 0.25 / 0.75])[0].weights
    assert all(torch.allclose(one.weights, expected, rtol=1e-6, atol=1e-6) for one in found)


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_of_no_finite_replica_is_not_finite(method: str) -> None:
    """The loss of the next step then ends the run."""
    moved = torch.full((2, 8), torch.inf)
    assert not any(one.weights.isfinite().any() for one in outer(method, torch.ones(8), [OuterRound(moved)]))


@pytest.mark.parametrize("method", ["slow-momentum", "sign-momentum"])
def test_a_round_without_learning_rate_moves_nothing(method: str) -> None:
    start = drawn(1, 20)
    rounds = [OuterRound(torch.zeros(2, 20), 0.0)]
    assert torch.equal(outer(method, start, rounds)[0].weights[0], start)


@pytest.mark.parametrize(
    ("method", "options", "down_bytes"),
    [
        ("local-averaging", {}, 4),
        ("slow-momentum", {}, 4),
        ("diloco", {}, 4),
        ("sign-momentum", {"download": "weights"}, 4),
        ("sign-momentum", {}, 1 / 4),
    ],
)
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_round_sends_weights_up_and_its_download(
    method: str, options: dict[str, str], down_bytes: float, replicas: int
) -> None:
    """In a round, each rank sends 4 d (W - 1) / W bytes up, and as many numbers down; and one vote."""
    length = 16 * 4 * 5
    part, votes = (replicas - 1) / replicas, 4 * (replicas - 1)
    for number in (1, 3):
        for one in outer(method, drawn(1, length), rounds_of(2, replicas, length, number), **options):
            assert one.sent_bytes == {
                "all_to_all": number * 4 * length * part,
                "all_gather": number * (down_bytes * length * part + votes),
            }


@pytest.mark.parametrize(
    ("method", "numbers"), [("slow-momentum", 2 / 4), ("diloco", 2 / 4), ("sign-momentum", 5 / 4)]
)
def test_a_rank_keeps_its_slice_of_the_states(method: str, numbers: float) -> None:
    for one in outer(method, drawn(1, 640), rounds_of(2, 4, 640, 1)):
        assert sum(state.numel() for state in one.states.values()) == numbers * 640
