"""The page of `weft score --report`: every prediction of a score next to its measurement."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.units import counted, format_bytes, format_seconds
from weft.scoring.metrics import Figures
from weft.scoring.score import BASELINE, ScoredRow, Scores
from weft.timeline.figures import error_text, prediction_error
from weft.web.charts.chart import Dot
from weft.web.pages.calibration import against_measured
from weft.web.pages.page import page_html, table_section

SCORE_HEAD = (
    "group",
    "rows",
    "error",
    "scaled",
    "median",
    "worst",
    "spearman",
    "kendall",
    "regret",
    "fits right",
    "inside",
    "interval",
)


def score_rows(scores: Scores) -> Iterator[tuple[str, ...]]:
    """Yield rows under `SCORE_HEAD`: each group, all groups pooled if there are several, and the baseline."""
    for name, figures in scores.figures.items():
        yield _row(name, figures)
    if len(scores.figures) > 1:
        yield _row("pooled", scores.pooled)
    yield _row(BASELINE, scores.plain)


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    width = figures.half_width
    return (
        name,
        str(figures.n),
        share(figures.mape),
        share(figures.mape_scaled),
        share(figures.median_ape),
        share(figures.max_ape),
        number(figures.spearman),
        number(figures.kendall),
        share(figures.regret),
        share(figures.oom_accuracy),
        share(figures.coverage),
        "-" if width is None else f"+- {width:.0%}",
    )


def score_page(scores: Scores) -> str:
    """Return a self-contained page: a picture of predicted over measured steps of all rows, and tables."""
    numbers = {id(row): number for number, row in scores.rows.items()}
    groups = [
        (name, [_dot(numbers[id(row)], row) for row in rows if row.row.status == "ok"])
        for name, rows in scores.groups.items()
    ]
    title = counted(scores.pooled.n, "measured step")
    sections = [
        against_measured("scatter", groups, title, rings="predicted not to fit"),
        table_section("figures", "Figures", SCORE_HEAD, list(score_rows(scores))),
    ]
    if scores.problems:
        problems = [(f"row {number}", problem) for number, problem in scores.problems.items()]
        sections.append(table_section("errors", "Rows that could not be predicted", ("row", "why"), problems))
    return page_html(f"Scores of {scores.file.path.name}", f"{len(scores.rows)} rows predicted", sections)


def _dot(number: int, scored: ScoredRow) -> Dot:
    measured_s = scored.row.measured_step_s
    assert measured_s is not None, "a row that is ok has a measured step"
    words = (
        f"row {number} {scored.row.name}: measured {format_seconds(measured_s)}, predicted "
        f"{format_seconds(scored.step_s)} (error {error_text(prediction_error(scored.step_s, measured_s))}), "
        f"peak {format_bytes(scored.peak_bytes)} of {format_bytes(scored.room_bytes)}, {scored.source}"
    )
    interval = (scored.low_s, scored.high_s)
    return Dot(x=measured_s, y=scored.step_s, words=words, interval=interval, filled=scored.fits)
