"""A learned placer: the cross-entropy method over the devices of groups, to compare others with.

Rubinstein, Methodology and Computing in Applied Probability 1999; for placement: Gao, Chen and Li (Post),
NeurIPS 2018. It draws placements, keeps the best tenth, and draws more like these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.errors import InputError, Violation
from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.program.arrays import Floats, Ints
from weft.randomness import counter_seed

EVALUATIONS = 2000
ROUND, BEST, KEPT = 100, 10, 0.3


class Improvement(NamedTuple):
    """The best placement after some evaluations."""

    evaluations: int
    placement: Placement


def learned(
    graph: OperatorGraph, devices: Devices, *, evaluations: int = EVALUATIONS, seed: int = 0
) -> Placement:
    """Return the best placement that a search draws; each is ordered by the earliest task first.

    Raises:
        InputError: when none of them fits.
    """
    found = [*improvements(graph, devices, evaluations=evaluations, seed=seed)]
    if not found:
        raise InputError(Violation("placement", f"none of {evaluations} drawn placements fits"))
    return found[-1].placement


def improvements(
    graph: OperatorGraph, devices: Devices, *, evaluations: int = EVALUATIONS, seed: int = 0
) -> Iterator[Improvement]:
    """Yield each placement that is better than all before, as the search finds it.

    A placement that lacks memory counts as an evaluation, too; the less it lacks, the better.
    """
    group: Ints = np.unique(graph.groups, return_inverse=True)[1]
    groups = int(group.max(initial=-1)) + 1
    chances = np.full((groups, devices.count), 1.0 / devices.count)
    best, done = math.inf, 0
    # Later rounds mostly draw what is known.
    known: dict[bytes, tuple[int, float]] = {}
    while done < evaluations:
        generator = np.random.default_rng(counter_seed(seed, "learned placement", done))
        drawn = _drawn(chances, generator, min(ROUND, evaluations - done))
        scores = []
        for choice in drawn:
            done += 1
            if (key := choice.tobytes()) not in known:
                lacking = lacking_bytes(graph, devices, choice[group])
                makespan = math.inf
                if not lacking:
                    placement = earliest_task_first(graph, devices, pinned=choice[group].tolist())
                    makespan = float(placement.makespan)
                    if makespan < best:
                        best = makespan
                        yield Improvement(done, placement)
                known[key] = lacking, makespan
            scores.append(known[key])
        order = sorted(range(len(drawn)), key=lambda number: scores[number])
        elite = drawn[order[:BEST]]
        shares = (elite[:, :, None] == np.arange(devices.count)).mean(axis=0)
        chances = KEPT * chances + (1.0 - KEPT) * shares


def _drawn(chances: Floats, generator: np.random.Generator, count: int) -> Ints:
    """Return devices of each group, shape (count, groups)."""
    bounds = chances.cumsum(axis=1)[:, :-1]
    found: Ints = (generator.random((count, len(chances), 1)) >= bounds).sum(axis=2)
    return found


def lacking_bytes(graph: OperatorGraph, devices: Devices, device: Ints) -> int:
    """Return by how many bytes placed operators exceed the memory of all devices, added up."""
    held = np.zeros(devices.count, dtype=np.int64)
    taken = held.copy()
    np.add.at(held, device, graph.permanent_bytes)
    np.maximum.at(taken, device, graph.temporary_bytes)
    tensors, readers = graph.reads[:, 0], graph.reads[:, 1]
    sent = np.unique(
        (tensors * devices.count + device[readers])[device[graph.producer[tensors]] != device[readers]]
    )
    np.add.at(held, sent % devices.count, graph.tensor_bytes[sent // devices.count])
    return int(np.maximum(held + taken - devices.memory_bytes, 0).sum())
