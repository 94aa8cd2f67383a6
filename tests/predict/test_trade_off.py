"""The critical batch and the trade-off between time and cost."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.predict.trade_off import (
    cheapest,
    critical_batch_tokens,
    samples_to_target,
)

UTILISATION = {1 / 8: 0.35, 1 / 4: 0.42, 1 / 2: 0.47, 1: 0.50, 2: 0.52, 4: 0.53}
COUNTS = st.floats(min_value=1e-3, max_value=1e9)
TABLES = st.dictionaries(
    st.integers(min_value=-6, max_value=4).map(lambda power: 2.0**power),
    st.floats(min_value=0.01, max_value=1.0),
    min_size=1,
)


@pytest.mark.parametrize(
    ("devices", "samples_per_device", "cost"),
    [(64, 2, 1.9832), (512, 1, 2.25), (4096, 1 / 4, 2.9762), (32768, 1 / 8, 5.7143)],
)
def test_the_golden_of_the_paper_s_model(devices: int, samples_per_device: float, cost: float) -> None:
    best = cheapest(UTILISATION, devices, 4096)
    assert best.samples_per_device == samples_per_device
    assert round(best.cost, 4) == cost
    assert best.time == best.cost / devices


@given(critical_batch=COUNTS)
def test_at_the_critical_batch_samples_are_twice_the_least(critical_batch: float) -> None:
    assert samples_to_target(critical_batch, critical_batch) == 2.0


@given(
    utilisation=TABLES,
    devices=st.lists(st.integers(min_value=1, max_value=10**6), min_size=2, unique=True),
    critical_batch=st.floats(min_value=1.0, max_value=1e6),
)
def test_the_best_samples_per_device_never_grow_with_the_cluster(
    utilisation: dict[float, float], devices: list[int], critical_batch: float
) -> None:
    curve = [cheapest(utilisation, count, critical_batch) for count in sorted(devices)]
    for smaller, larger in pairwise(curve):
        other = samples_to_target(smaller.samples_per_device * larger.devices, critical_batch)
        # Only rounding can tell two choices apart that cost the same.
        same = math.isclose(other / smaller.utilisation, larger.cost, rel_tol=1e-12)
        assert larger.samples_per_device <= smaller.samples_per_device or same


@given(
    utilisation=TABLES,
    devices=st.integers(min_value=1, max_value=10**6),
    critical_batch=st.floats(min_value=1.0, max_value=1e6),
)
def test_no_samples_per_device_cost_less_than_the_chosen(
    utilisation: dict[float, float], devices: int, critical_batch: float
) -> None:
    best = cheapest(utilisation, devices, critical_batch)
    for beta, value in utilisation.items():
        assert best.cost <= (1 + beta * devices / critical_batch) / value * (1 + 1e-12)


def test_time_tends_to_that_of_the_least_batch_per_utilisation() -> None:
    devices = 10**9
    best = cheapest(UTILISATION, devices, 4096)
    least = min(beta / value for beta, value in UTILISATION.items())
    assert best.time == pytest.approx(least / 4096, rel=1e-4)


def test_larger_models_have_larger_critical_batches() -> None:
    small, large = critical_batch_tokens(6_600_000_000), critical_batch_tokens(52_000_000_000)
    assert 5e6 < small < 8e6
    assert 1.1e7 < large < 1.6e7


def test_everything_wrong_is_listed_at_once() -> None:
    with pytest.raises(InputError) as refused:
        cheapest({1.0: 0.0, 2.0: 1.5}, 8, 4096)
    assert [str(item) for item in refused.value.violations] == [
        "utilisation at 1 samples per device: 0; more than 0, at most 1 is allowed",
        "utilisation at 2 samples per device: 1.5; more than 0, at most 1 is allowed",
    ]
    with pytest.raises(InputError, match="no samples per device"):
        cheapest({}, 8, 4096)
    with pytest.raises(InputError) as refused:
        samples_to_target(0, -1)
    assert len(refused.value.violations) == 2
    with pytest.raises(InputError, match="parameters"):
        critical_batch_tokens(0)
