"""Prices of a Program: the `Costs` of its instructions in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.bundles import parts
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.prediction import SHARED
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.predict.corrections import UNMEASURED_MEMORY, MemoryCorrection
from weft.predict.cost.communicators import Communicators
from weft.predict.cost.hooks import LeadOf, hook_of
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import (
    LIVE_SPREAD,
    Held,
    base_bytes,
    base_half_widths,
    held_bytes,
    live_bytes,
    working_bytes,
)
from weft.predict.costs import Costs
from weft.program.arrays import Floats, Ints
from weft.program.kinds import KINDS
from weft.program.program import Program

TICK_S = 1e-9
# In one step: the simulator unrolls up to 16, in 63 bits.
_MOST_TICKS = 2**58
# A measurement on a busy machine may spread by its whole value; a step still takes some time.
LEAST_SCALE = 0.1
_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Costs and their uncertainty.

    `twins` are the ranks that each rank with instructions stands for, itself included. `low_scale` and
    `high_scale` times a predicted time are the ends of its 90 % interval. `source` names the origins of the
    times. `shared` is the part of the errors' variance that all plans share. `base_half_widths` are those of
    the intervals of `costs.base_bytes`, shape (ranks,), and `held` their parts by name. `memory` corrects
    peaks; no other bytes have it. `communicators` lie beside them.
    """

    costs: Costs
    base_half_widths: Floats
    held: Mapping[str, Held]
    twins: Mapping[int, Ints]
    communicators: Communicators
    low_scale: float
    high_scale: float
    source: str
    shared: float = SHARED
    memory: MemoryCorrection = UNMEASURED_MEMORY

    __repr__ = one_line

    def peak_half_widths(self, peak_bytes: Ints) -> Floats:
        """Return the half-widths of the 90 % intervals of peaks; shapes (ranks,).

        Errors of parts count as fully correlated: they come from one model of the same layers.
        """
        return self.base_half_widths + LIVE_SPREAD * (peak_bytes - self.costs.base_bytes)

    def corrected_peaks(self, peak_bytes: Ints) -> tuple[Ints, Ints]:
        """Return peaks as measured ones correct them, and the upper ends of their 90 % intervals."""
        half_widths = self.memory.widening * self.peak_half_widths(peak_bytes)
        peaks: Ints = np.rint(self.memory.factor * peak_bytes).astype(np.int64)
        return peaks, peaks + np.rint(self.memory.factor * half_widths).astype(np.int64)


def price(model: CostModel, program: Program, plan: Plan) -> Priced:
    """Return the costs of every instruction of a plan's program.

    Raises:
        InputError: when the cluster has fewer ranks than the plan, a kind has no cost hook, or there are no
            compute times (see `ComputeModel.stage_times`).
    """
    return price_placed(PlacedPlan(program=program, plan=plan, model=model.of(plan)), program)


def price_placed(placed: PlacedPlan, program: Program) -> Priced:
    """Return the costs as `price` does; `placed` may come from a program of the plan with another length.

    Raises:
        InputError: as `price` does.
    """
    cluster = placed.model.cluster
    if program.ranks > cluster.ranks:
        raise InputError(
            Violation(
                "plan", f"uses {counted(program.ranks, 'rank')}, but {cluster.name} has {cluster.ranks}"
            )
        )
    pricing = Pricing(program=program, placed=placed)
    held = held_bytes(pricing)
    costs, half_width, sources = _costs_of(pricing, base_bytes(held.values(), program.ranks))
    low_scale, high_scale = max(LEAST_SCALE, 1.0 - half_width), 1.0 + half_width
    source, shared, memory = ", ".join(sorted(sources)), SHARED, UNMEASURED_MEMORY
    if (correction := placed.model.correction) is not None:
        low_scale, high_scale = correction.interval(low_scale, high_scale)
        source, shared = f"{source}, {correction.in_words()}", correction.shared
        memory = correction.memory
    return Priced(
        costs=costs,
        base_half_widths=base_half_widths(held.values(), program.ranks),
        held=held,
        twins=placed.twins,
        communicators=placed.communicators,
        low_scale=low_scale,
        high_scale=high_scale,
        source=source,
        shared=shared,
        memory=memory,
    )


def _costs_of(pricing: Pricing, base_bytes: Ints) -> tuple[Costs, float, frozenset[str]]:
    """Return the costs of all rows by their hooks, the hooks' largest spread and their sources."""
    program = pricing.program
    occupancy, latency, link_s = (np.zeros(len(program)) for _ in range(3))
    spread, sources = 0.0, frozenset[str]()
    kinds = {code: np.flatnonzero(program.columns.kind == code) for code in _codes(program)}
    for code, rows in kinds.items():
        taken = hook_of(KINDS[code].name)(pricing, rows)
        occupancy[rows], latency[rows], link_s[rows] = taken.occupancy, taken.latency, taken.link
        spread, sources = max(spread, taken.spread), sources | taken.sources
    synchronous = pricing.model.network.places.synchronous[: program.ranks]
    lead, rest = np.zeros(len(program)), np.zeros(len(program))
    for one in parts(LeadOf):
        rows = kinds.get(KINDS.code(one.kind), _NO_ROWS)
        lead[rows], rest[rows] = one.hook(pricing, rows, occupancy, link_s)
    costs = Costs(
        occupancy=_ticks(occupancy),
        latency=_ticks(latency),
        tick_s=TICK_S,
        synchronous=synchronous,
        live_bytes=live_bytes(pricing),
        working_bytes=working_bytes(pricing),
        base_bytes=base_bytes,
        links=pricing.links,
        group_links=pricing.placed.links.group_links,
        demand=np.divide(link_s, occupancy, out=np.ones(len(program)), where=occupancy > 0.0),
        lead=_ticks(lead),
        rest=_ticks(rest),
        compute_slowdown=pricing.placed.slowdowns[0],
        communication_slowdown=pricing.placed.slowdowns[1],
    )
    return costs, spread, sources


def _codes(program: Program) -> list[int]:
    codes: list[int] = np.unique(program.columns.kind).tolist()
    return codes


def _ticks(seconds: Floats) -> Ints:
    """Return whole ticks.

    Raises:
        InputError: if a step may last longer than the simulator can count.
    """
    ticks = np.rint(seconds / TICK_S)
    if ticks.sum() > _MOST_TICKS:
        raise InputError(
            Violation("plan", "a step takes years: the computations of its ranks add up to nine")
        )
    return ticks.astype(np.int64)
