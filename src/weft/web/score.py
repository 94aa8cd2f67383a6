"""Scores of the cost model: tables for terminals, and a page that shows every prediction."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from weft.describe.units import format_bytes, format_seconds
from weft.scoring.metrics import Figures
from weft.scoring.score import BASELINE, ScoredRow, Scores
from weft.timeline.figures import error_text, prediction_error
from weft.web.charts import Axis
from weft.web.page import page_html, picture_section, table_section
from weft.web.scatter import Dot, coloured, scatter_svg

HEAD = (
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
_WIDE_ONLY = ("median", "worst", "kendall", "interval")


def score_rows(scores: Scores) -> Iterator[tuple[str, ...]]:
    """The groups, all of them pooled, and the baseline, as texts under `HEAD`."""
    for name, figures in scores.figures.items():
        yield _row(name, figures)
    if len(scores.figures) > 1:
        yield _row("pooled", scores.pooled)
    yield _row(BASELINE, scores.plain)


def score_table(scores: Scores) -> Table:
    """`score_rows` for a terminal, without those columns that 80 characters have no room for."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = [place for place, name in enumerate(HEAD) if name not in _WIDE_ONLY]
    for place in shown:
        table.add_column(
            HEAD[place], justify="right" if place else "left", no_wrap=bool(place), overflow="fold"
        )
    for row in score_rows(scores):
        table.add_row(*(row[place] for place in shown))
    return table


def score_page(scores: Scores) -> str:
    """A self-contained page: predicted over measured steps of all rows, and the tables."""
    groups = [
        (name, [_dot(number, row) for number, row in _numbered(scores, rows) if row.row.status == "ok"])
        for name, rows in scores.groups.items()
    ]
    seconds = format_seconds
    svg = scatter_svg(
        coloured(groups),
        Axis(label="measured step", logarithmic=True, text=seconds),
        Axis(
            label="predicted step, with its 90 % interval; rings: predicted not to fit",
            logarithmic=True,
            text=seconds,
        ),
        title=f"{scores.pooled.n} measured steps",
        diagonal=True,
    )
    sections = [
        picture_section("scatter", "Predicted against measured", svg),
        table_section("figures", "Figures", HEAD, list(score_rows(scores))),
    ]
    if scores.problems:
        problems = [(f"row {number}", problem) for number, problem in scores.problems.items()]
        sections.append(table_section("errors", "Rows that could not be predicted", ("row", "why"), problems))
    return page_html(f"Scores of {scores.file.path.name}", f"{len(scores.rows)} rows predicted", sections)


def _numbered(scores: Scores, rows: tuple[ScoredRow, ...]) -> Iterator[tuple[int, ScoredRow]]:
    numbers = {id(row): number for number, row in scores.rows.items()}
    for row in rows:
        yield numbers[id(row)], row


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
