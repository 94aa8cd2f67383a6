"""`score`: predict every row of a file of measurements, and compute the quality of the predictions."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.long_steps import predict_long
from weft.predict.engine import load_compiled_engine
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.scoring.measurements import Measurement, MeasurementFile, read_measurements
from weft.scoring.metrics import Figures, Point, figures_of, pooled_figures
from weft.scoring.subject import Subject, Subjects

# The baseline for the cost model, a prediction on paper that ignores layouts: a step takes
# 6 operations per parameter and token at 45 % of the peaks of all devices.
BASELINE = "6N at 45 %"
FLOPS_PER_PARAMETER = 6
UTILISATION = 0.45


def plain_step_s(plan: Plan, graph: LayerGraph, cluster: Cluster) -> float:
    """Return the baseline's seconds of a step; all devices must have the plan's precision."""
    flops = FLOPS_PER_PARAMETER * graph.parameters() * plan.global_batch * plan.sequence
    peak = sum(cluster.device_of(rank).flops_per_s[plan.precision] for rank in range(plan.ranks))
    return flops / (UTILISATION * peak)


UNGROUPED = "all"
# From this number of rows on, loading the compiled engine saves time.
_MANY = 20
PREDICTED_COLUMNS = ("predicted_step_s", "low", "high", "peak_bytes", "fits", "chance_to_fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """The prediction for a row: seconds of a step with the ends of the 90 % interval, and bytes of memory.

    `peak_bytes` and `room_bytes` are of the rank with the least memory left. The room is the memory that
    reserve and communicators leave to tensors.
    `chance_to_fit` is the probability that all ranks have enough memory. `plain_s` is the result of
    `plain_step_s`.
    """

    row: Measurement
    step_s: float
    low_s: float
    high_s: float
    peak_bytes: int
    room_bytes: int
    chance_to_fit: float
    plain_s: float
    source: str

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.room_bytes

    @property
    def point(self) -> Point:
        measured_s = self.row.measured_step_s if self.row.status == "ok" else None
        return Point(
            measured_s=measured_s,
            predicted_s=self.step_s,
            low_s=self.low_s,
            high_s=self.high_s,
            fits=self.fits,
        )

    @property
    def plain_point(self) -> Point:
        """The baseline's point: it always predicts a fit, and its interval is empty."""
        plain_s = self.plain_s
        return replace(self.point, predicted_s=plain_s, low_s=plain_s, high_s=plain_s, fits=True)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All rows of a file by number: the predictions, and the problems of rows without a prediction."""

    file: MeasurementFile
    rows: Mapping[int, ScoredRow]
    problems: Mapping[int, str]

    @cached_property
    def groups(self) -> Mapping[str, tuple[ScoredRow, ...]]:
        """The scored rows by group, without rows of status `other`."""
        groups: dict[str, list[ScoredRow]] = defaultdict(list)
        for scored in self.rows.values():
            if scored.row.status != "other":
                groups[scored.row.group or UNGROUPED].append(scored)
        return {name: tuple(rows) for name, rows in sorted(groups.items())}

    @cached_property
    def figures(self) -> Mapping[str, Figures]:
        """The figures by group."""
        return {name: figures_of([one.point for one in rows]) for name, rows in self.groups.items()}

    @cached_property
    def pooled(self) -> Figures:
        return pooled_figures({name: [one.point for one in rows] for name, rows in self.groups.items()})

    @cached_property
    def plain(self) -> Figures:
        """The pooled figures of the baseline."""
        groups = {name: [one.plain_point for one in rows] for name, rows in self.groups.items()}
        return replace(pooled_figures(groups), coverage=None, half_width=None)

    def as_record(self) -> dict[str, Any]:
        """Return the record for the JSON output."""
        return {
            "pooled": self.pooled.as_record(),
            "baseline": self.plain.as_record(),
            "groups": {name: figures.as_record() for name, figures in self.figures.items()},
            "errors": {str(number): problem for number, problem in self.problems.items()},
            "ignored_columns": list(self.file.ignored),
        }

    def to_csv(self) -> str:
        """Return the file's CSV text with `PREDICTED_COLUMNS` added; their cells are empty after an error."""
        text = io.StringIO()
        columns = [column for column in self.file.columns if column not in PREDICTED_COLUMNS]
        writer = csv.DictWriter(
            text, [*columns, *PREDICTED_COLUMNS], extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        for number, cells in enumerate(self.file.cells, start=1):
            found = self.rows.get(number)
            answer: dict[str, object] = dict.fromkeys(PREDICTED_COLUMNS, "")
            if found is not None:
                times = found.step_s, found.low_s, found.high_s
                values = (*times, found.peak_bytes, int(found.fits), f"{found.chance_to_fit:.4g}")
                answer = dict(zip(PREDICTED_COLUMNS, values, strict=True))
            writer.writerow({**cells, **answer})
        return text.getvalue()


def score(
    path: Path,
    *,
    cluster: str | None = None,
    profile: Path | None = None,
    report: ProgressReport = unwatched,
) -> Scores:
    """Predict and score every row of a file; report rows without a prediction by number.

    `cluster` and `profile` replace the cluster and the profile of every row. `report` gets the number of rows
    that are predicted, of all.

    Raises:
        InputError: when the file cannot be read, or no row can be predicted.
    """
    file = read_measurements(path)
    subjects = Subjects(folder=path.parent, cluster=cluster, profile=profile)
    if len(file.rows) >= _MANY:
        load_compiled_engine()
    known: dict[object, ScoredRow] = {}
    rows: dict[int, ScoredRow] = {}
    problems = dict(file.problems)
    counted = CountedWork(report, "predicting", len(file.rows), "rows")
    for number, row in counted.each(file.rows.items()):
        try:
            rows[number] = _scored(row, subjects, known)
        except InputError as error:
            problems[number] = "; ".join(str(violation) for violation in error.violations)
    if not rows:
        first = min(problems)
        raise InputError(f"{path}: no row can be predicted; row {first}: {problems[first]}")
    return Scores(file=file, rows=rows, problems=dict(sorted(problems.items())))


def _scored(row: Measurement, subjects: Subjects, known: dict[object, ScoredRow]) -> ScoredRow:
    subject = subjects.of(row)
    # Rows that differ only in their measurement, such as repeated runs, are predicted once.
    key = (subject.plan.plan_id, id(subject.cost_model))
    if key not in known:
        known[key] = _predicted(row, subject)
    return replace(known[key], row=row)


def _predicted(row: Measurement, subject: Subject) -> ScoredRow:
    prediction = predict_long(subject.cost_model, subject.plan).prediction
    usable_bytes = subject.cost_model.network.places.usable_bytes.tolist()
    beside = prediction.communicator_bytes or (0,) * len(prediction.peak_bytes)
    rooms = (room - held for room, held in zip(usable_bytes, beside, strict=False))
    peak, room = min(zip(prediction.peak_bytes, rooms, strict=True), key=lambda one: one[1] - one[0])
    return ScoredRow(
        row=row,
        step_s=prediction.step_s,
        low_s=prediction.step_low_s,
        high_s=prediction.step_high_s,
        peak_bytes=peak,
        room_bytes=room,
        chance_to_fit=prediction.chance_to_fit(usable_bytes),
        plain_s=plain_step_s(subject.plan, subject.cost_model.graph, subject.cost_model.cluster),
        source=prediction.source,
    )
