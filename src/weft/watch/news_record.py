"""News of a run as plain data for pages and other programs."""

from __future__ import annotations

from typing import Any

from weft.watch.newest_steps import NewestStep, late_ranks
from weft.watch.watched_run import News
from weft.web.pages.watch import MOST_RANKS, curves_record, lateness_record, step_record


def head_record(news: News) -> dict[str, Any]:
    """Return the state of a run now: names, figures, interval and problem."""
    run = news.overview
    return {
        "name": run.path.name,
        "model": run.model,
        "plan": run.plan,
        "state": str(run.state),
        "done": run.done / max(1, run.steps),
        "figures": [one._asdict() for one in news.figures],
        "interval": news.interval_s,
        "problem": news.problem,
    }


def news_record(news: News) -> dict[str, Any]:
    """Return the state of a run and everything that its viewer has not seen."""
    step = news.step
    return {
        "head": head_record(news),
        "anew": news.anew,
        "curves": curves_record(news.steps),
        "heldOut": news.held_out,
        "notes": [(note.time_s, note.text, note.bad) for note in news.notes],
        **({} if step is None else _step_record(news.overview.path.name, step)),
    }


def _step_record(name: str, step: NewestStep) -> dict[str, Any]:
    comparison = step.comparison
    return {
        "timeline": step_record(name, step.predicted, step.measured),
        "lateness": lateness_record(comparison, late_ranks(comparison, MOST_RANKS)),
    }
