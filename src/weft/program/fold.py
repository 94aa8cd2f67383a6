"""Folding: the simulation of one pipeline replica, or one tensor lane, in place of all equal ones.

Replicas are folded when a program is built (`only_replica`), lanes afterwards. The program names the kept
replica and lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.program import NONE, Program


def fold_lanes(program: Program) -> Program:
    """Return the program with only the first tensor lane of every replica, which stands for the others.

    Groups keep all ranks, and `kept_lane` names the lane. A program without tensor parallelism is returned
    unchanged.

    Raises:
        InputError: when an edge joins two lanes, because then they are not independent.
    """
    owners = program.obligations.owners
    if all(len(ranks) == 1 for ranks in owners.values()):
        return program
    first = np.zeros(program.ranks, dtype=np.bool_)
    first[[ranks[0] for ranks in owners.values()]] = True
    kept = first[program.columns.rank]
    position = np.where(kept, np.cumsum(kept) - 1, NONE)
    edges = program.edges
    inside = kept[edges.source]
    if (inside != kept[edges.target]).any():
        raise InputError(Violation("program", "has edges between tensor lanes, which cannot be folded then"))
    return replace(
        program,
        columns=program.columns.take(np.flatnonzero(kept)),
        edges=edges.take(inside).at(position),
        obligations=replace(
            program.obligations, owners={place: ranks[:1] for place, ranks in owners.items()}
        ),
        kept_lane=0,
    )


def twins_of(program: Program, stages: Sequence[Ints]) -> Mapping[int, Ints]:
    """Return the ranks that each simulated rank stands for, including itself.

    `stages` are the ranks of every stage, each of shape (replicas, lanes). Twins of two ranks that exchange
    messages are in the same order.
    """
    few_replicas, few_lanes = program.kept_replica is not None, program.kept_lane is not None
    if not few_replicas and not few_lanes:
        return dict(enumerate(np.arange(program.ranks, dtype=np.int64)[:, None]))
    twins: dict[int, Ints] = {}
    for stage, ranks in enumerate(stages):
        simulated = sorted(replica for held, replica in program.obligations.owners if held == stage)
        lanes = range(1 if few_lanes else ranks.shape[1])
        for replica, lane in product(simulated, lanes):
            # Replicas of one pipeline are adjacent, so replicas like this one have their number as distance.
            alike = ranks[replica % len(simulated) :: len(simulated)] if few_replicas else ranks[[replica]]
            alike = alike if few_lanes else alike[:, lane]
            twins[int(ranks[replica, lane])] = alike.ravel()
    return twins
