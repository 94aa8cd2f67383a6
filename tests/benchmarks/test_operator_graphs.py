"""Graphs of benchmarks: the same for a seed, of about the asked size, with the times of data sheets."""

from __future__ import annotations

import numpy as np
import pytest
from operator_graphs import A100, GRAPHS, V100, Drawn, devices_of

from weft.planning.placement.placers import PLACERS
from weft.planning.placement.verification import check_placement


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_those_of_their_seed_and_can_be_placed(name: str) -> None:
    one, other = (GRAPHS[name](120, 7).graph([A100, V100]) for _ in range(2))
    assert np.array_equal(one.ticks, other.ticks)
    assert np.array_equal(one.reads, other.reads)
    assert 110 <= one.operators <= 160
    assert (one.ticks[:, 0] <= one.ticks[:, 1]).all()
    devices = devices_of(2, 1e12)
    assert check_placement(one, devices, PLACERS["m-etf"](one, devices)) == []


def test_an_operator_takes_its_operations_or_its_bytes_and_its_launches() -> None:
    made = Drawn()
    first = made.add("input", 1000)
    made.add("linear", 2000, first, multiplies=True)
    graph = made.graph([A100], rows=1000)
    # Forwards and backwards: 6 x 1000 x 1000 x 2000 operations at 156 TFLOP/s, and 6 x 2000 x 1000 bytes.
    assert graph.ticks[:, 0].tolist() == [
        round(6 * 2e6 / 1.55e12 * 1e9 + 1e4),
        round(12e9 / 156e12 * 1e9 + 1e4),
    ]
    assert graph.permanent_bytes.tolist() == [2 * 1000 * 1000, 16 * 2_000_000 + 2 * 1000 * 2000]
    assert graph.tensor_bytes.tolist() == [2 * 1000 * 1000]
