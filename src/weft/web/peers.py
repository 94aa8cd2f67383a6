"""A peer's word beside weft's, as JSON and as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.describe.units import format_bytes, format_seconds
from weft.doors.peers.beside import Beside, Judged, Ranked

# Plans of both that no planner has as its best, and reasons why others are left out.
SHOWN = 5


def beside_record(beside: Beside) -> dict[str, Any]:
    """Plain figures; seconds and bytes, None where the peer cannot say a plan."""
    return {
        "peer": beside.peer,
        "leaves_out": list(beside.always),
        "asked": len(beside.plans),
        "said": len(beside.both),
        "spearman": beside.agreement,
        "plans": [_plan_record(one) for one in beside.plans],
    }


def _plan_record(one: Judged) -> dict[str, Any]:
    plan = one.candidate.plan
    return {
        "plan_id": plan.plan_id if plan is not None else None,
        "layout": one.candidate.words,
        "best_of": list(one.best_of),
        "step_s": one.step_s,
        "peak_bytes": one.candidate.peak_bytes,
        "peer_step_s": one.said.step_s,
        "peer_peak_bytes": one.said.peak_bytes,
        "peer_breakdown": dict(one.said.breakdown),
        "approximated": list(one.said.approximated),
        "reason": one.said.reason,
    }


def beside_table(beside: Beside) -> Group:
    """The best plan of each planner and the shortest of the others that both can say, then the whole."""
    rest = [one for one in beside.both if not one.best_of][:SHOWN]
    rows = [one for one in beside.plans if one.best_of or any(one is other for other in rest)]
    figures = Table(box=None, pad_edge=False, header_style="dim")
    figures.add_column("", justify="right", no_wrap=True)
    for name in ("step", "peak"):
        for who in ("weft", beside.peer):
            figures.add_column(f"{name}\n{who}", justify="right", no_wrap=True)
    figures.add_column("\nplan, and remarks", overflow="fold")
    for place, one in enumerate(rows, start=1):
        said = one.said
        words = Text(one.candidate.words)
        if one.best_of:
            words.append(f" (best of {', '.join(one.best_of)})", style="dim")
        if remarks := said.reason or "; ".join(said.approximated):
            words.append(f"\n{remarks}", style="dim")
        figures.add_row(
            str(place),
            format_seconds(one.step_s),
            "-" if said.step_s is None else format_seconds(said.step_s),
            format_bytes(one.candidate.peak_bytes),
            "-" if said.peak_bytes is None else format_bytes(said.peak_bytes),
            words,
        )
    return Group(figures, *(Text(line) for line in _summary(beside)))


def ranked_record(ranked: Ranked) -> dict[str, Any]:
    """Plain figures of a peer that plans."""
    return {
        "peer": ranked.peer,
        "considered": ranked.considered,
        "said": ranked.said,
        "simulated": ranked.simulated,
        "spearman": ranked.agreement,
        "reasons": dict(ranked.reasons),
    }


def ranked_lines(ranked: Ranked) -> Group:
    """How many of its plans weft can say, and how alike both rank them."""
    lines = [f"weft can say {ranked.said} of the first {ranked.considered} plans of {ranked.peer}"]
    lines += [f"  not {count} of them: {reason}" for reason, count in ranked.reasons[:SHOWN]]
    lines.append(f"over the {ranked.simulated} simulated ones: {_order(ranked.agreement)}")
    return Group(*map(Text, lines))


def _order(agreement: float | None) -> str:
    return "too few to compare the order" if agreement is None else f"rank correlation {agreement:.2f}"


def _summary(beside: Beside) -> list[str]:
    said = f"{beside.peer} can say {len(beside.both)} of {len(beside.plans)} simulated plans"
    lines = [f"{said}: {_order(beside.agreement)}"]
    lines += [f"  not {count} of them: {reason}" for reason, count in beside.reasons[:SHOWN]]
    lines.append(f"{beside.peer} leaves out: {'; '.join(beside.always)}")
    return lines
