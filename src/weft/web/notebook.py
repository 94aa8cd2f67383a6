"""A plan as a notebook shows it: what it is, its stages with their memory, and one predicted step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from weft.describe.cluster import Cluster
from weft.describe.plan import Plan, Stage, shared_out
from weft.describe.units import format_bytes, format_seconds
from weft.timeline.timeline import Timeline
from weft.web.svg import timeline_svg

# Of more stages the first and the last are shown.
MAXIMUM_STAGES = 24
MAXIMUM_RANKS = 8
_HEAD = ("stage", "layers", "ranks", "recompute", "peak memory", "of the device's")
_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'


def plan_html(plan: Plan, cluster: Cluster, timeline: Timeline, *, title: str) -> str:
    """A self-contained piece of HTML.

    Args:
        timeline: one step of the plan, predicted.
    """
    parts = [
        f"<p><b>{escape(title)}</b><br/>{escape(_figures(plan))}</p>",
        _table([_row(index, stage, plan, cluster) for index, stage in enumerate(plan.stages)]),
        timeline_svg(timeline, title="One step, predicted"),
    ]
    return f'<div class="weft-plan">{"".join(parts)}</div>'


def _figures(plan: Plan) -> str:
    words = [
        f"{plan.global_batch} samples of {plan.sequence} tokens in micro-batches of {plan.micro_batch_size}",
        f"{plan.schedule.name}, {shared_out(plan.sharding, plan.island)}, {plan.precision}",
    ]
    if plan.prediction is not None:
        low, high = plan.prediction.step_low_s, plan.prediction.step_high_s
        words.append(
            f"step {format_seconds(plan.prediction.step_s)} "
            f"({format_seconds(low)} to {format_seconds(high)}, {plan.prediction.source})"
        )
    return "; ".join(words)


def _row(index: int, stage: Stage, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Memory is that of the stage's fullest rank, with all that lies on it."""
    ranks = sorted(rank for replica in stage.replicas for rank in replica.ranks)
    cells = (str(index), _span(stage.layers), _listed(ranks), stage.recompute)
    if plan.prediction is None:
        return (*cells, "", "")
    peaks = plan.prediction.peak_bytes
    fullest = max(ranks, key=lambda rank: peaks[rank] / cluster.device_of(rank).memory_bytes)
    share = peaks[fullest] / cluster.device_of(fullest).memory_bytes
    return (*cells, format_bytes(peaks[fullest]), f"{share:.0%}")


def _span(layers: Sequence[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MAXIMUM_RANKS])
    more = len(ranks) - MAXIMUM_RANKS
    return f"{shown} and {more} more" if more > 0 else shown


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    half = MAXIMUM_STAGES // 2
    hidden = len(rows) - MAXIMUM_STAGES
    lines = [_line(row) for row in rows]
    if hidden > 0:
        note = f'<tr><td {_CELL} colspan="{len(_HEAD)}">{hidden} more stages</td></tr>'
        lines = [*lines[:half], note, *lines[-half:]]
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in _HEAD)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _line(row: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td {_CELL}>{escape(cell)}</td>' for cell in row)}</tr>"
