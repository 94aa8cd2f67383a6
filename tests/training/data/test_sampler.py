"""Laws of the sample ledger: a permutation per epoch, a function of (seed, position) alone."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.training.data.sampler import SampleLedger, StepSamples

samples = st.integers(1, 700)
seeds = st.integers(0, 2**63)


@given(samples, seeds, st.integers(0, 5))
def test_every_sample_comes_exactly_once_per_epoch(count: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * count, (epoch + 1) * count)
    assert sorted(SampleLedger(count, seed).at(positions)) == list(range(count))


@given(samples, seeds, st.integers(0, 3000), st.integers(0, 60))
def test_a_position_is_found_without_the_ones_before_it(
    count: int, seed: int, position: int, size: int
) -> None:
    ledger = SampleLedger(count, seed)
    stream = ledger.at(np.arange(position + size))
    assert np.array_equal(ledger.take(position, size), stream[position:])


class Runs(NamedTuple):
    """Starts of one job: steps, global batch, replicas and micro-batch size of each."""

    starts: list[tuple[int, int, int, int]]


@st.composite
def runs(draw: st.DrawFn) -> Runs:
    starts = []
    for _ in range(draw(st.integers(1, 5))):
        replicas, size, micro_batches = (draw(st.integers(1, 4)) for _ in range(3))
        global_batch = replicas * size * micro_batches
        starts.append((draw(st.integers(1, 8)), global_batch, replicas, size))
    return Runs(starts)


@given(st.integers(1, 80), seeds, runs())
def test_every_sample_comes_once_per_epoch_through_restarts_and_changes(
    count: int, seed: int, job: Runs
) -> None:
    """Of world size, micro-batch size and global batch; batches need not divide the samples."""
    ledger = SampleLedger(count, seed)
    seen: list[int] = []
    for steps, global_batch, replicas, size in job.starts:
        first = len(seen)  # all that a checkpoint holds
        for step in range(steps):
            numbers = range(global_batch // size)
            # A replica reads every so many micro-batches, each in its own process.
            read = {
                number: ledger.take(first + step * global_batch + number * size, size).tolist()
                for replica in range(replicas)
                for number in numbers[replica::replicas]
            }
            seen += [sample for number in numbers for sample in read[number]]
    for start in range(0, len(seen), count):
        epoch = seen[start : start + count]
        assert len(set(epoch)) == len(epoch)
    assert seen == ledger.take(0, len(seen)).tolist()


@given(st.integers(10**9, 2**50), st.integers(0, 2**50))
def test_huge_data_costs_no_memory_and_any_position_is_reached_at_once(count: int, position: int) -> None:
    taken = SampleLedger(count, 1).take(position, 64)
    assert taken.min() >= 0
    assert taken.max() < count
    # 64 positions reach into two epochs at most.
    border = min(64, count - position % count)
    for part in (taken[:border], taken[border:]):
        assert len(set(part.tolist())) == len(part)


def test_epochs_are_passes_over_the_data() -> None:
    assert SampleLedger(40, 0).epochs(100) == 2.5


def test_seeds_and_epochs_give_different_orders() -> None:
    first_epoch, second_epoch = np.arange(500), np.arange(500, 1000)
    ledger = SampleLedger(500, 0)
    orders = [ledger.at(first_epoch), ledger.at(second_epoch), SampleLedger(500, 1).at(first_epoch)]
    assert len({order.tobytes() for order in orders}) == 3


def test_the_order_looks_random() -> None:
    order = SampleLedger(10_000, 3).at(np.arange(10_000)).astype(float)
    # Standard deviation of a serial correlation of 10 000 random ranks is 0.01.
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_the_order_stays_the_same_across_versions() -> None:
    assert SampleLedger(10, 7).take(0, 10).tolist() == [2, 4, 0, 9, 3, 5, 7, 8, 6, 1]


def test_no_samples_is_refused() -> None:
    with pytest.raises(InputError, match="0 samples"):
        SampleLedger(0, 1)


@given(
    numbers=st.lists(st.lists(st.integers(0, 9), min_size=1, unique=True), min_size=1, max_size=4),
    size=st.integers(1, 3),
    steps=st.integers(0, 10),
)
def test_micro_batches_that_run_take_one_sample_after_the_other(
    numbers: list[list[int]], size: int, steps: int
) -> None:
    samples = StepSamples(tuple(map(tuple, numbers)), size)
    taken: list[int] = []
    for step in range(steps):
        assert samples.before(step) == len(taken)
        for number in numbers[step % len(numbers)]:
            assert samples.runs(step, number)
            first = samples.position(step, number)
            taken += range(first, first + size)
        assert not samples.runs(step, 10)
        assert samples.of(step) == len(taken) - samples.before(step)
    assert taken == list(range(samples.before(steps)))
