"""Repair: never worse, legal, and better where a part lies wrong."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from random_operators import devices_of, graph_of, questions

from weft.errors import InputError
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.placers import PLACERS
from weft.planning.placement.repair import longest_chain_operators, repaired
from weft.planning.placement.verification import check_placement, scheduled


@settings(max_examples=25)
@given(asked=questions(grouped=True))
def test_repairs_are_legal_and_each_is_better(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    try:
        start = earliest_task_first(graph, devices)
    except InputError:
        return
    found = [*repaired(graph, devices, start, evaluations=40)]
    makespans = [one.placement.makespan for one in found]
    assert found[0] == (0, start)
    assert makespans == sorted(set(makespans), reverse=True)
    assert all(check_placement(graph, devices, one.placement) == [] for one in found)


@given(asked=questions(communications=["parallel"]))
def test_the_longest_chain_has_no_gap_but_transfers(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    try:
        placement = earliest_task_first(graph, devices)
    except InputError:
        return
    chain = longest_chain_operators(graph, placement)
    assert placement.end[chain[0]] == placement.makespan
    assert placement.start[chain[-1]] == 0
    arrivals = {(one.tensor, one.target): one for one in placement.transfers}
    for after, before in pairwise(chain):
        gap = placement.start[after] - placement.end[before]
        home = int(placement.device[after])
        sent = [
            arrivals[tensor, home]
            for tensor in graph.tensors_read[after]
            if (tensor, home) in arrivals and graph.producer[tensor] == before
        ]
        assert gap == 0 or gap in [one.end - one.start for one in sent]


def test_a_chain_that_is_cut_is_put_together() -> None:
    graph = graph_of([[2, 2]] * 8, [(one, 5, [one + 1]) for one in range(7)])
    devices = devices_of(2, latency=3.0)
    cut = scheduled(graph, devices, np.array([0, 1, 1, 0, 0, 0, 1, 1]), np.arange(8))
    *_, last = repaired(graph, devices, cut, evaluations=200)
    assert (cut.makespan, last.placement.makespan) == (25, 16)


@settings(max_examples=15)
@given(asked=questions(most=8))
def test_repair_begins_with_the_best_of_the_others(asked: tuple[OperatorGraph, Devices]) -> None:
    graph, devices = asked
    others = []
    for name in ("m-topo", "m-etf", "m-sct", "heft", "expert"):
        try:
            others.append(PLACERS[name](graph, devices).makespan)
        except InputError:
            continue
    if others:
        assert PLACERS["repair"](graph, devices).makespan <= min(others)
