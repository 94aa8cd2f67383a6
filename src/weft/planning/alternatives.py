"""`alternatives`: the plans that a user might prefer to the best one, each of another kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from weft.describe.layout_words import differences
from weft.describe.units import format_bytes
from weft.planning.planners import Candidate, Ranking
from weft.planning.ties import standing

# Smaller savings of memory are no reason to prefer a plan.
NOTED_SAVING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A fitting candidate with other degrees, sharding, recomputation, loss or synchronisation than the best.

    Attributes:
        changed: its decisions that differ from the best plan's, in words.
        slower_by: its step over the best one's, minus 1; negative where rules prefer a slower best plan.
        reason: its standing against the best plan, in one clause.
    """

    candidate: Candidate
    changed: str
    slower_by: float
    reason: str


def alternatives(ranking: Ranking, most: int) -> tuple[Alternative, ...]:
    """Return the best fitting candidate of each other kind, in the ranking's order, `most` of them."""
    best = ranking.fitting[0]
    return tuple(
        Alternative(
            candidate=one,
            changed=_changed(one, best),
            slower_by=one.step_s / best.step_s - 1.0,
            reason=_reason(ranking, one),
        )
        for one in islice(_of_other_kinds(ranking), most)
    )


def _of_other_kinds(ranking: Ranking) -> Iterator[Candidate]:
    met = set[tuple[object, ...]]()
    for one in ranking.fitting:
        if (kind := _kind(one)) not in met:
            if met:
                yield one
            met.add(kind)


def _changed(one: Candidate, best: Candidate) -> str:
    if one.layout is None or best.layout is None:
        return one.words
    return differences(one.layout, best.layout)


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Return what makes plans of two kinds; orders, buckets and micro-batches only tune a plan."""
    layout, plan = candidate.layout, candidate.plan
    if layout is None:
        return () if plan is None else (*sorted(plan.replicas), *sorted(plan.tensor_degrees))
    degrees = (layout.pp, layout.dp, layout.ep, layout.cp, layout.tp)
    names = tuple(one.name for one in layout.methods)
    return (*degrees, layout.sharding, layout.recompute, layout.sync, names)


def _reason(ranking: Ranking, candidate: Candidate) -> str:
    best = ranking.fitting[0]
    said, *_ = re.split("[;:]", standing(ranking, candidate).text)
    saved = best.peak_bytes - candidate.peak_bytes
    less = [f"{format_bytes(saved)} less memory"] if saved > NOTED_SAVING * best.peak_bytes else []
    return ", ".join([said.removesuffix(" with the best"), *less] if said else less)
