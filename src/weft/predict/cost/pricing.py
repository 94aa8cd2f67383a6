"""What cost hooks look at: a program, and tables of times that several hooks share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weft.describe.device import Device
from weft.describe.plan import Plan
from weft.predict.cost.cost_model import CostModel
from weft.predict.cost.placed_plan import PlacedPlan
from weft.program.buffers import MAKES_GRADIENTS, last_gradients
from weft.program.codes import distinct_rows
from weft.program.kinds import REDUCE, is_any_of, is_send
from weft.program.program import NONE, Ints, Program

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A program in front of its cost models; `placed` is its plan on the cluster."""

    program: Program
    placed: PlacedPlan

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def model(self) -> CostModel:
        return self.placed.model

    def in_program_s(self, alone_s: float, device: Device, speed: float) -> float:
        """Seconds of a computation of the program that takes a device of speed 1 `alone_s` by itself."""
        return (alone_s + self.model.compute.instruction_s(device)) / speed

    @cached_property
    def completes_gradient(self) -> Ints:
        """By instruction, 1 where context ranks add up their stage's gradient at its end, else 0."""
        completes = np.zeros(len(self.program), dtype=np.int64)
        if self.plan.context_parallel > 1:
            for rank in range(self.program.ranks):
                completes[list(last_gradients(self.program, rank))] = 1
        return completes

    @cached_property
    def links(self) -> Ints:
        """Numbers of the two links that each message between nodes occupies, else -1: (instructions, 2).

        The messages of a rank's twins are one flow here, with as large a share as that of any other rank, on
        the links of the first of them that leaves its node.
        """
        columns = self.program.columns
        links = np.full((len(columns), 2), NONE, dtype=np.int64)
        sends = np.flatnonzero(is_send(columns.kind))
        ranks, peers = columns.rank[sends], columns.peer[sends]
        first, which = distinct_rows(ranks, peers)
        pairs = zip(ranks[first].tolist(), peers[first].tolist(), strict=True)
        table = [self.placed.links.messages[pair].links for pair in pairs]
        links[sends] = np.array(table, dtype=np.int64).reshape(-1, 2)[which]
        return links


def reduction_lead(
    pricing: Pricing, occupancy: Seconds, link_s: Seconds, synchronous: npt.NDArray[np.bool_]
) -> tuple[Seconds, Seconds]:
    """Seconds before the end of a stage's last backward at which its reduction may start, and those that are
    left of it at that end; both (instructions,).

    Gradients are reduced layer by layer as they become ready, and layers count as equal: of n layers all but
    one can be reduced beside the backward, unless they are reduced faster than they become ready. One that
    meets others on its links takes longer and hides as much more, so that it starts as early as if it met all
    of them, but the last layer's part always follows. A device that computes on its host posts nothing
    meanwhile.
    """
    program = pricing.program
    columns, edges = program.columns, program.edges
    lead, rest = np.zeros(len(program)), np.zeros(len(program))
    if "reductions" in pricing.plan.blocking:
        return lead, rest
    made = is_any_of(columns.kind[edges.source], MAKES_GRADIENTS) & (columns.kind[edges.target] == REDUCE)
    np.maximum.at(lead, edges.target[made], occupancy[edges.source[made]])
    rows = np.flatnonzero(columns.kind == REDUCE)
    layers = np.array([len(stage.layers) for stage in pricing.plan.stages])[columns.stage[rows]]
    hidden = np.where(synchronous[columns.rank[rows]], 0.0, 1.0 - 1.0 / layers)
    group = columns.group[rows]
    each = link_s[rows] / pricing.placed.links.flows_of_group[group]
    in_step = np.maximum(occupancy[rows], each * pricing.placed.links.lanes_of_group[group])
    longest = np.maximum(in_step, each * pricing.placed.links.users_of_group[group])
    lead[rows] = hidden * np.minimum(lead[rows], longest)
    rest[rows] = np.where(lead[rows] > 0.0, in_step / layers, 0.0)
    return lead, rest
