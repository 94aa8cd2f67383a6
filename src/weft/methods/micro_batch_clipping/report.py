"""The report's section about clipped micro-batches: bounds, norms before clipping, and suppression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weft.describe.tasks import sources_of
from weft.methods.micro_batch_clipping.options import ClipTable, options_of
from weft.methods.micro_batch_clipping.size import estimate
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import (
    SAMPLE_SOURCES,
    ChartLine,
    ReportSection,
    Rows,
    SectionChart,
    Table,
)
from weft.program.arrays import Floats

# The norm of each clipped micro-batch's mean gradient before clipping. The bound of a step, the share of its
# micro-batches above the bound, and of those that are left out because their norm is not finite.
NORMS = "clip_norms"
BOUND, CLIPPED, DROPPED = "clip_bound", "clipped", "dropped"
# The bound of each micro-batch, where sources have bounds of their own; BOUND is their mean.
BOUNDS = "clip_bounds"
# The norm of the step's gradient, which runs record that also clip it ([optimizer] clip_norm).
GRADIENT = "gradient_norm"
# Rows of the table: the micro-batches that lost most.
MOST_ROWS = 10_000

Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ClippedSteps:
    """The clipped micro-batches of all steps like the last one: a resumed run may have another batch.

    Attributes:
        rows: the metrics of each step.
        norms: (steps, micro-batches), not a number where it was not finite.
        bounds: those of micro-batches, (steps, micro-batches), or of steps, (steps, 1).
    """

    rows: Metrics
    norms: Floats
    bounds: Floats

    @classmethod
    def of(cls, metrics: Metrics) -> ClippedSteps | None:
        told = [row for row in metrics if NORMS in row]
        if not told:
            return None
        told = [row for row in told if _shape(row) == _shape(told[-1])]
        norms = [[np.nan if one is None else one for one in row[NORMS]] for row in told]
        bounds = [row.get(BOUNDS, [row[BOUND]]) for row in told]
        return cls(told, np.array(norms, dtype=np.float64), np.array(bounds, dtype=np.float64))

    @cached_property
    def suppressed(self) -> Floats:
        """The share of each gradient's length that clipping took, (steps, micro-batches)."""
        kept = self.bounds / np.maximum(self.norms, np.finfo(np.float64).tiny)
        lost: Floats = 1.0 - np.minimum(1.0, np.nan_to_num(kept, nan=0.0))
        return lost

    def sources(self, count: int) -> Floats | None:
        """Return the share of each source's samples, (steps, micro-batches, sources); None if unknown."""
        if count < 2 or any(SAMPLE_SOURCES not in row for row in self.rows):
            return None
        numbers = np.array([row[SAMPLE_SOURCES] for row in self.rows])
        own: Floats = np.eye(count)[numbers].reshape(*self.norms.shape, -1, count).mean(axis=2)
        return own


def _shape(row: Mapping[str, Any]) -> tuple[int, bool]:
    return len(row[NORMS]), BOUNDS in row


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    table, clipped = options_of(planned.plan), ClippedSteps.of(metrics)
    if table is not None and table.by_stage:
        return _of_stages(table, [row for row in metrics if BOUND in row])
    if table is None or clipped is None:
        return []
    told, bounds = clipped.rows, clipped.bounds.mean(axis=1)
    dropped = sum(row[DROPPED] for row in told) / len(told)
    return [
        ("clipped micro-batches", f"{table.samples} samples, to {table.micro}"),
        ("bound, first and last step", f"{bounds[0]:.4g}, {bounds[-1]:.4g}"),
        ("median norm, last step", f"{np.nanmedian(clipped.norms[-1]):.4g}"),
        ("above the bound", f"{sum(row[CLIPPED] for row in told) / len(told):.1%}"),
        ("length that clipping leaves, mean", f"{1.0 - clipped.suppressed.mean():.1%}"),
        ("left out, not finite", f"{dropped:.1%}"),
        *_size(planned, table, clipped),
        *_sources(planned, clipped),
    ]


def _of_stages(table: ClipTable, told: Metrics) -> Rows:
    """Return means over stages with norms of their own, of which no rank knows those of others."""
    if not told:
        return []
    means = [sum(row[name] for row in told) / len(told) for name in (CLIPPED, DROPPED)]
    return [
        ("clipped micro-batches", f"{table.samples} samples, to {table.micro}, stage by stage"),
        ("mean bound of stages, first and last step", f"{told[0][BOUND]:.4g}, {told[-1][BOUND]:.4g}"),
        ("above the bound", f"{means[0]:.1%}"),
        ("left out, not finite", f"{means[1]:.1%}"),
    ]


def _size(planned: PlannedJob, table: ClipTable, clipped: ClippedSteps) -> Rows:
    """Return the size of micro-batches that recorded norms make best, for `min` with the gradient's norm."""
    lengths = np.array([row.get(GRADIENT, np.nan) for row in clipped.rows], dtype=np.float64)
    if table.micro != "min" or table.sources > 1:
        return []
    bounds = clipped.bounds.mean(axis=1)
    known = np.isfinite(lengths) & (bounds > 0) & np.isfinite(clipped.norms).all(axis=1)
    if not known.any():
        return []
    found = estimate(clipped.norms[known], lengths[known] / bounds[known], table.samples)
    if found is None:
        return [("size by the norms", "unknown: the directions of a step do not agree")]
    best = min(max(found.best_samples, 1.0), float(planned.problem.job.global_batch))
    reach = " and ".join(
        f"{found.reach(samples):.1%} with {samples:.0f}" for samples in (table.samples, best)
    )
    return [
        ("samples that pull away, estimated", f"{found.rate:.2%}"),
        ("noise of a sample over the gradient, squared", f"{found.noise:.3g}"),
        ("size by the norms", f"{best:.0f} samples; a mean of directions reaches {reach}"),
    ]


def _sources(planned: PlannedJob, clipped: ClippedSteps) -> Iterator[tuple[str, str]]:
    """Yield the sources, those that lost most first."""
    names = list(sources_of(planned.run.task.data))
    shares, lost = clipped.sources(len(names)), clipped.suppressed
    if shares is None:
        return
    samples = np.maximum(shares.sum(axis=(0, 1)), np.finfo(np.float64).tiny)
    means = (shares * lost[:, :, None]).sum(axis=(0, 1)) / samples
    norms = (shares * np.nan_to_num(clipped.norms)[:, :, None]).sum(axis=(0, 1)) / samples
    for number in np.argsort(-means, kind="stable").tolist():
        yield names[number], f"loses {means[number]:.1%} of its length; mean norm {norms[number]:.4g}"


def _table(planned: PlannedJob, metrics: Metrics) -> Table | None:
    """Return the micro-batches that lost most, the first ones first."""
    clipped, names = ClippedSteps.of(metrics), list(sources_of(planned.run.task.data))
    if clipped is None:
        return None
    lost, shares = clipped.suppressed, clipped.sources(len(names))
    bounds = np.broadcast_to(clipped.bounds, lost.shape)
    order = np.argsort(-lost, axis=None, kind="stable")[:MOST_ROWS]
    places = zip(*(index.tolist() for index in np.unravel_index(order, lost.shape)), strict=True)
    rows = [
        (
            clipped.rows[step]["step"],
            number,
            f"{clipped.norms[step, number]:.6g}",
            f"{bounds[step, number]:.6g}",
            f"{lost[step, number]:.6g}",
            "; ".join(names) if shares is None else _named(names, shares[step, number]),
        )
        for step, number in places
    ]
    return Table(("step", "micro_batch", "norm", "bound", "suppressed", "source"), rows)


def _named(names: Sequence[str], shares: Floats) -> str:
    """Return the sources of a micro-batch, the largest first."""
    order = np.argsort(-shares, kind="stable").tolist()
    return "; ".join(f"{names[one]} {shares[one]:.0%}" for one in order if shares[one])


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    clipped = ClippedSteps.of(metrics)
    if clipped is None:
        return None
    steps = [row["step"] for row in clipped.rows]
    curves = (
        ChartLine("bound", list(zip(steps, clipped.bounds.mean(axis=1).tolist(), strict=True))),
        ChartLine("median norm", list(zip(steps, np.nanmedian(clipped.norms, axis=1).tolist(), strict=True))),
    )
    return SectionChart(curves, "step")


SECTION = ReportSection(
    name="micro-batch-clipping", title="Clipped micro-batches", rows=_rows, chart=_chart, table=_table
)
