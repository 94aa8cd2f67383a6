"""The page of `weft score --report`: every prediction of a score next to its measurement."""

from __future__ import annotations

from weft.describe.units import format_bytes, format_seconds
from weft.scoring.score import ScoredRow, Scores
from weft.timeline.figures import error_text, prediction_error
from weft.web.charts.axes import Axis
from weft.web.charts.chart import Chart, Dot, coloured, dots_svg
from weft.web.pages.page import page_html, picture_section, table_section
from weft.web.rows.score import SCORE_HEAD, score_rows


def score_page(scores: Scores) -> str:
    """Return a self-contained page: a picture of predicted over measured steps of all rows, and tables."""
    numbers = {id(row): number for number, row in scores.rows.items()}
    groups = [
        (name, [_dot(numbers[id(row)], row) for row in rows if row.row.status == "ok"])
        for name, rows in scores.groups.items()
    ]
    across, up = (
        Axis(label=label, logarithmic=True, text=format_seconds)
        for label in ("measured step", "predicted step, with its 90 % interval; rings: predicted not to fit")
    )
    chart = Chart(across=across, up=up, drawn=coloured(groups), diagonal=True)
    svg = dots_svg(chart, title=f"{scores.pooled.n} measured steps")
    sections = [
        picture_section("scatter", "Predicted against measured", svg),
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
