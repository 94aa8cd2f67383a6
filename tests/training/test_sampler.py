"""Laws of the sample ledger: a permutation per epoch, a function of (seed, step) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.training.sampler import SampleLedger

samples = st.integers(1, 700)
seeds = st.integers(0, 2**63)


@given(samples, seeds, st.integers(0, 5))
def test_every_sample_comes_exactly_once_per_epoch(count: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * count, (epoch + 1) * count)
    assert sorted(SampleLedger(count, seed).at(positions)) == list(range(count))


@given(samples, seeds, st.integers(1, 40), st.integers(0, 60))
def test_a_step_is_found_without_the_steps_before_it(count: int, seed: int, batch: int, step: int) -> None:
    ledger = SampleLedger(count, seed)
    stream = ledger.at(np.arange((step + 1) * batch))
    assert np.array_equal(ledger.sample_ids(step, batch), stream[step * batch :])


@given(samples, seeds, st.integers(1, 12), st.integers(1, 12), st.integers(0, 8))
def test_the_stream_does_not_depend_on_the_batch_size(
    count: int, seed: int, batch: int, other: int, steps: int
) -> None:
    ledger = SampleLedger(count, seed)
    one = [ledger.sample_ids(step, batch) for step in range(steps * other)]
    two = [ledger.sample_ids(step, other) for step in range(steps * batch)]
    assert np.array_equal(np.concatenate([*one, []]), np.concatenate([*two, []]))


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
    assert SampleLedger(10, 7).sample_ids(0, 10).tolist() == [2, 4, 0, 9, 3, 5, 7, 8, 6, 1]


def test_no_samples_is_refused() -> None:
    with pytest.raises(InputError, match="0 samples"):
        SampleLedger(0, 1)
