"""Law: held-out samples fill whole batches, and few ones count alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.training.evaluation.held_out import HELD_OUT_SAMPLES, spread_evenly


@given(available=st.integers(1, 1000), batch=st.integers(1, 64))
def test_samples_are_in_whole_batches_and_spread_evenly(available: int, batch: int) -> None:
    samples = spread_evenly(available, batch)
    assert len(samples) % batch == 0
    assert 0 <= len(samples) - min(available, HELD_OUT_SAMPLES) < batch
    times = np.bincount(samples, minlength=available)
    assert len(times) == available
    # Only the last batch makes some of few count more often than others.
    assert times.max() - times.min() <= 1
    if available <= HELD_OUT_SAMPLES:
        assert times.min() >= 1
