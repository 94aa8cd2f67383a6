"""The live page: its parts as text, and the records with which a server keeps it up to date.

Every page is one document with its own styles and scripts. It loads nothing but news, from the server that
it came from. Names of runs are data, as in a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from weft.program.kinds import kind_words
from weft.timeline.compare import Comparison
from weft.timeline.timeline import Timeline
from weft.training.directory.live_run import StepFigures
from weft.training.directory.overview import RunOverview
from weft.web.pages.page import scripted_page
from weft.web.pages.page_record import thin, timeline_record
from weft.web.pages.report_data import ReportData
from weft.web.rows.run import LIST_HEAD, list_cells

_SCRIPTS = ("draw.js", "charts.js", "timeline.js", "save.js", "watch.js")
_STYLES = ("report.css", "watch.css")
# The most ranks in the table of late ranks.
MOST_RANKS = 32


def watch_page(title: str, runs: Sequence[Mapping[str, str]] | None) -> str:
    """Return the page of one run, of several side by side, or of a folder's list of runs.

    Args:
        runs: for each run its `name`, and the addresses of its `news` and its `report`; None for the list.
    """
    return scripted_page(
        "watch.html", _STYLES, _SCRIPTS, {"runs": runs, "head": LIST_HEAD}, {"title": escape(title)}
    )


def list_record(runs: Iterable[RunOverview]) -> list[dict[str, Any]]:
    """Return the rows of the list of runs: names, states, and figures as text."""
    return [
        {
            "name": run.path.name,
            "model": run.model,
            "plan": run.plan,
            "state": str(run.state),
            "done": run.done / max(1, run.steps),
            "figures": list_cells(run),
        }
        for run in runs
    ]


def curves_record(steps: Sequence[StepFigures]) -> dict[str, list[tuple[float, float | None]]]:
    """Return the curves of some steps by name, thinned to a bounded number of points."""
    return {
        name: thin([(one.step, getattr(one, name)) for one in steps])
        for name in ("loss", "step_s", "tokens_per_s", "memory_bytes")
        if any(math.isfinite(getattr(one, name)) for one in steps)
    }


def step_record(run: str, predicted: Timeline, measured: Timeline) -> dict[str, object]:
    """Return one measured step below the predicted one, as the page's timeline reads it."""
    return timeline_record(ReportData(run=run, predicted=predicted, measured=measured))


def lateness_record(comparison: Comparison, ranks: Mapping[int, float]) -> dict[str, Any]:
    """Return the late seconds of these ranks by kind of instruction, and the latest instructions."""
    kinds = list(dict.fromkeys(pair.kind for pair in comparison.kinds))
    late = {(pair.rank, pair.kind): (pair.predicted_s, pair.measured_s) for pair in comparison.ranks}
    return {
        "steps": comparison.steps,
        "kinds": [kind_words(kind) for kind in kinds],
        "ranks": [
            {"rank": rank, "late": seconds, "cells": [late.get((rank, kind)) for kind in kinds]}
            for rank, seconds in ranks.items()
        ],
        "left_out": len({pair.rank for pair in comparison.ranks}) - len(ranks),
        "worst": [
            {
                "rank": one.rank,
                "name": f"{kind_words(one.kind)} {one.name}",
                "times": (one.predicted_s, one.measured_s),
            }
            for one in comparison.worst[:5]
        ],
    }
