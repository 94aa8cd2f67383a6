"""The answer of `weft plan`: the ranking with its reasons, forecasts and measured plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from weft.cli.corrections import lesson_record, lesson_text
from weft.cli.output import console, print_json, progressing, say_written, write_asked
from weft.cli.rankings import print_ranking
from weft.cli.tables.answer import ALTERNATIVES, alternative_record, answer, plain_words
from weft.cli.tables.candidates import advised_record
from weft.cli.tables.search import (
    forecast_record,
    forecasts_table,
    kept_out_record,
    trial_record,
    trials_table,
)
from weft.describe.units import format_seconds
from weft.planning.advice import advised
from weft.planning.alternatives import alternatives
from weft.planning.decisions import decided_words
from weft.planning.fewer_nodes import FewerNodes
from weft.planning.planned import DEFAULT_PLANNER, decided_file
from weft.planning.planned_job import PlannedJob
from weft.planning.what_if import Forecast, what_if
from weft.run.launch.workers import require_torch
from weft.training.directory.learning import learn_from_trials
from weft.training.trials import Trial, measure_best
from weft.web.pages.search import plan_page

# Candidates of JSON, pages and lists, where nobody has asked for a number.
SHOWN = 12


def show_plan(
    planned: PlannedJob,
    source: str,
    *,
    fewer: FewerNodes | None,
    listed: int | None,
    changes: Sequence[str],
    measure: int | None,
    out: Path | None,
    report: Path | None,
    json: bool,
) -> None:
    """Show the best plan and its alternatives, forecasts of changed clusters, and trials of `measure` plans.

    `listed` is the number of candidates that are listed below; None: no list, and `SHOWN` in JSON.
    Trials correct later predictions. `out` receives the best plan: the fastest measured plan, if there are
    trials. `report` receives a page of all candidates. `fewer` is a better plan without some nodes.

    Raises:
        InputError: if a change is invalid.
        RunError: if none of the plans to measure ran.
    """
    ranking = planned.searched
    forecasts: tuple[Forecast, ...] = ()
    if changes:
        with progressing("what if") as progress:
            planner = planned.run.plan.planner or DEFAULT_PLANNER
            forecasts = what_if(planned, planner, changes, report=progress)
    # Advice simulates, so only those who see it wait for it.
    seen = json or report is not None or listed is not None
    shown = advised(ranking, SHOWN if listed is None else listed) if seen else ()
    others = alternatives(ranking, ALTERNATIVES)
    trials: tuple[Trial, ...] = ()
    if measure is not None:
        require_torch()
        trials = measure_best(planned, measure)
    lesson = learn_from_trials(planned, trials)
    best = trials[0].candidate if trials else ranking.fitting[0]
    file = decided_file(planned.run, planned.problem, best)
    page = partial(plan_page, planned, shown, forecasts, trials, lesson)
    write_asked([(out, file.to_json), (report, page)])
    if json:
        by_plan = {one.candidate.plan.plan_id: one for one in trials if one.candidate.plan is not None}
        records = [advised_record(one) for one in shown]
        for record in records:
            trial = by_plan.get(record["plan_id"])
            record["measured_step_s"] = trial.step_s if trial is not None else None
        print_json(
            {
                "assumed": dict(planned.problem.assumed),
                "steps_at_half": dict(planned.steps_at_half),
                "idle": dict(planned.idle),
                "better_without": None if fewer is None else fewer.record(),
                "throughput": asdict(planned.throughput),
                "kept_out": kept_out_record(planned.problem),
                "considered": len(ranking.candidates),
                "best": plain_words(planned),
                "alternatives": [alternative_record(one) for one in others],
                "candidates": records,
                "what_if": [forecast_record(one) for one in forecasts],
                "measured": [trial_record(one, lesson) for one in trials],
                "learned": lesson_record(lesson) if lesson is not None else None,
                "decided": decided_words(planned),
                "then": _then_record(planned),
            }
        )
        return
    console().print(answer(planned, others, fewer, source))
    if listed is not None:
        print_ranking(planned, shown)
    if (then := _then_record(planned)) is not None:
        print(f"from step {then['at_step']} on: {then['layout']}, step {format_seconds(then['step_s'])}")
    if forecasts:
        console().print("", forecasts_table(forecasts), sep="\n")
    if trials:
        console().print("", trials_table(trials, lesson), sep="\n")
    if lesson is not None:
        print(f"\n{lesson_text(lesson)}")
    say_written(out, report)


def _then_record(planned: PlannedJob) -> dict[str, Any] | None:
    """Return the record of the later plan, with its step in seconds; None without a later plan."""
    if planned.later is None:
        return None
    at_step, job = planned.later
    words, plan_id = job.searched.fitting[0].words, job.plan.plan_id
    return {"at_step": at_step, "layout": words, "plan_id": plan_id, "step_s": job.prediction.step_s}
