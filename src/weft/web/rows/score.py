"""Scores of the cost model as text: a row for each group, and one for all groups."""

from __future__ import annotations

from collections.abc import Iterator

from weft.scoring.metrics import Figures
from weft.scoring.score import BASELINE, Scores

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
