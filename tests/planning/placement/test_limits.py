"""Placers under limits: with less memory they lose no placement that still fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_operators import devices_of, graph_of, questions

from weft.planning.placement.fastest import Placer
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.limits import STEADY, placed_within_limits
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.preparation import CoPlacement, prepared
from weft.planning.placement.verification import check_placement

CO_PLACEMENTS = st.sampled_from(["readers", "chains", "none"])


@pytest.mark.parametrize("placer", STEADY.values(), ids=STEADY)
@given(
    asked=questions(grouped=True),
    memory=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    co_placement=CO_PLACEMENTS,
)
def test_less_memory_loses_no_placement_that_still_fits(
    placer: Placer, asked: tuple[OperatorGraph, Devices], memory: tuple[int, int], co_placement: CoPlacement
) -> None:
    graph, devices = asked
    less, more = (replace(devices, memory_bytes=np.full(devices.count, one)) for one in sorted(memory))
    steps = [placement.makespan for _, placement in placed_within_limits(graph, less, co_placement, placer)]
    for _, placement in placed_within_limits(graph, more, co_placement, placer):
        if (placement.peak_bytes <= less.memory_bytes).all():
            assert min(steps) <= placement.makespan


@pytest.mark.parametrize("placer", STEADY.values(), ids=STEADY)
@given(asked=questions(grouped=True), co_placement=CO_PLACEMENTS)
def test_placements_within_limits_fit_the_devices(
    placer: Placer, asked: tuple[OperatorGraph, Devices], co_placement: CoPlacement
) -> None:
    graph, devices = asked
    for reduced, placement in placed_within_limits(graph, devices, co_placement, placer):
        assert check_placement(reduced.fused, devices, placement) == []


def test_smaller_groups_lose_what_larger_groups_find() -> None:
    # With ample memory all of a chain is one group; 6 bytes make it two, though the same would fit.
    graph = graph_of([[one, one] for one in (4, 4, 3, 4, 2)], [(0, 0, [4]), (3, 0, [4])], (0, 2, 2, 2, 1))
    steps = []
    for memory_bytes in (100, 6):
        devices = devices_of(2, memory_bytes)
        alone = earliest_task_first(prepared(graph, devices).fused, devices).makespan
        found = [one for _, one in placed_within_limits(graph, devices)]
        best = min(found, key=lambda one: one.makespan)
        steps.append((alone, best.makespan, int(best.peak_bytes.max())))
    assert steps == [(10, 10, 4), (13, 10, 4)]
