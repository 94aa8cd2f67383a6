"""Stages of the least pipeline time: as good as every other cut, with and without devices of their own."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.moves.pipeline_partition import pipeline_partition


def seconds_of(work: np.ndarray, cuts: np.ndarray, micro_batches: int, counts: tuple[int, ...]) -> float:
    ends = np.cumsum(counts)
    stages = [
        work[stage, end - count : end].sum()
        for stage, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]
    crossed = sum(cuts[stage, end - 1] for stage, end in enumerate(ends[:-1]))
    return float(sum(stages) + crossed + (micro_batches - 1) * max(stages))


@st.composite
def chains(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    seconds = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 5.0))

    def table(rows: int) -> np.ndarray:
        row = st.lists(seconds, min_size=layers, max_size=layers)
        return np.array(draw(st.lists(row, min_size=rows, max_size=rows))).reshape(rows, layers)

    work = table(stages) if draw(st.booleans()) else np.repeat(table(1), stages, axis=0)
    return work, table(stages - 1), draw(st.integers(1, 20))


@given(chains())
def test_no_other_cut_is_better(chain: tuple[np.ndarray, np.ndarray, int]) -> None:
    work, cuts, micro_batches = chain
    stages, layers = work.shape
    found = pipeline_partition(work, cuts, micro_batches)
    assert sum(found.layers_per_stage) == layers
    assert min(found.layers_per_stage) >= 1
    every = (np.diff([0, *borders, layers]) for borders in combinations(range(1, layers), stages - 1))
    best = min(seconds_of(work, cuts, micro_batches, tuple(counts.tolist())) for counts in every)
    assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert seconds_of(work, cuts, micro_batches, found.layers_per_stage) == pytest.approx(
        best, rel=1e-9, abs=1e-9
    )


def test_equal_cuts_are_broken_towards_the_shortest_stage_and_early_cuts() -> None:
    work, cuts = np.ones((3, 7)), np.zeros((2, 7))
    assert pipeline_partition(work, cuts, 1).layers_per_stage == (1, 3, 3)
    # Sums that only rounding tells apart are equal.
    assert pipeline_partition(np.full((3, 7), 0.1), cuts, 4).layers_per_stage == (1, 3, 3)


def test_a_dear_cut_is_avoided_until_waiting_costs_more() -> None:
    work, cuts = np.ones((2, 6)), np.array([[0.0, 0.0, 3.0, 0.0, 0.0, 0.0]])
    assert pipeline_partition(work, cuts, 2).layers_per_stage == (2, 4)
    assert pipeline_partition(work, cuts, 9).layers_per_stage == (3, 3)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="3 stages; between 1 and 2 layers' worth fit"):
        pipeline_partition(np.ones((3, 2)), np.zeros((2, 2)), 4)
