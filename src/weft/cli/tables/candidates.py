"""Candidates of a planner as records and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.output import ranked_table
from weft.describe.cluster import Cluster
from weft.describe.units import format_bytes, format_seconds
from weft.planning.advice import Advised
from weft.planning.planners import Candidate, Verdict
from weft.web.pages.search import change_text


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """Return one candidate as plain figures in seconds and bytes, None if the layout was not simulated.

    `estimate_s` is the estimate of the planner's own model; None if the planner uses the simulator.
    """
    prediction = candidate.prediction
    return {
        "layout": candidate.words,
        **(candidate.layout.record() if candidate.layout is not None else {}),
        "verdict": str(candidate.verdict),
        "reason": candidate.reason,
        "bound_s": candidate.bound_s,
        "estimate_s": candidate.estimate_s,
        "step_s": prediction.step_s if prediction else None,
        "step_low_s": prediction.step_low_s if prediction else None,
        "step_high_s": prediction.step_high_s if prediction else None,
        "peak_bytes": candidate.peak_bytes or None,
        "peak_high_bytes": max(prediction.peak_high_bytes) if prediction else None,
        "plan_id": candidate.plan.plan_id if candidate.plan else None,
    }


def advised_record(advised: Advised) -> dict[str, Any]:
    """Return `candidate_record` with `probability_faster`, `standing` and `smallest_change`."""
    change = advised.smallest_change
    return {
        **candidate_record(advised.candidate),
        "probability_faster": advised.standing.probability_faster,
        "standing": advised.standing.text,
        "smallest_change": None
        if change is None
        else {"change": change.words, **candidate_record(change.candidate)},
    }


def plans_table(shown: Sequence[Advised], cluster: Cluster) -> Table:
    """Return a table of ranked plans, best first, with the peak memory of the fullest device."""
    figures = ("", "step", "90 % interval", "peak memory")
    table = ranked_table(figures, "plan, and why it stands here")
    for place, advised in enumerate(shown, start=1):
        candidate, step, interval = advised.candidate, "-", "-"
        fits = candidate.verdict is Verdict.FITS
        if (one := candidate.prediction) is not None:
            step, interval = format_seconds(one.step_s), one.interval
        words = Text(candidate.words, style="bold" if fits else "")
        if reason := _reason(advised):
            words.append(f"\n{reason}", style="not bold dim")
        peak = _peak_text(candidate, cluster)
        table.add_row(str(place), step, interval, peak, words, style=None if fits else "dim")
    return table


def _peak_text(candidate: Candidate, cluster: Cluster) -> str:
    """Return the peak of the fullest device and its share; without a prediction, of the smallest device."""
    peak_bytes, prediction = candidate.peak_bytes, candidate.prediction
    memory_bytes = min(group.device.memory_bytes for group in cluster.groups)
    if prediction is not None:
        memory = (cluster.device_of(rank).memory_bytes for rank in range(len(prediction.peak_bytes)))
        pairs = zip(prediction.peak_bytes, memory, strict=True)
        peak_bytes, memory_bytes = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{format_bytes(peak_bytes)} ({peak_bytes / memory_bytes:.0%})" if peak_bytes else "-"


def _reason(advised: Advised) -> str:
    """Return the reason for the rank, the estimate of the planner's own model, and the advised change."""
    candidate = advised.candidate
    reason = candidate.reason
    if candidate.estimate_s is not None and candidate.plan is not None:
        reason = f"{reason}; estimated {format_seconds(candidate.estimate_s)}"
    more = (advised.standing.text, change_text(advised.smallest_change))
    return "; ".join([reason, *filter(None, more)])
