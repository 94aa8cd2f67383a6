"""Answers of planners on the terminal: one planner's ranking, or the best plans of several planners."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.cli.output import (
    console,
    plain_table,
    print_json,
    progressing,
    say_written,
    searching,
    write_asked,
)
from weft.cli.tables.candidates import candidate_record, plans_table
from weft.cli.tables.plan import job_text, memory_bars
from weft.cli.tables.search import kept_out_record
from weft.describe.run_file import RunFile
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.planning.advice import Advised
from weft.planning.comparison import Answer, compare_planners
from weft.planning.planned import DEFAULT_PLANNER, decided_file, plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Planner, get_planner
from weft.planning.planners.weft import WeftPlanner
from weft.planning.precisions import precisions_of
from weft.planning.problem import Problem, problem_of_run


def answer_record(answer: Answer) -> dict[str, Any]:
    """Return one planner's answer; `best` is its `candidate_record`, or None without a candidate."""
    return {
        "planner": answer.planner,
        "search_s": answer.search_s,
        "considered": answer.considered,
        "fits": answer.fits,
        "passed_over": answer.passed_over,
        "behind": answer.behind,
        "reason": answer.reason,
        "best": None if answer.candidate is None else candidate_record(answer.candidate),
    }


def answers_table(answers: Sequence[Answer]) -> Group:
    """Return a table of figures, one row per planner in the given order, and the best plan of each."""
    # Plans are long: next to the figures they would not fit into 80 columns.
    figures = plain_table()
    figures.add_column("planner", no_wrap=True)
    for name in ("step", "behind", "90 % interval", "estimate", "peak", "search"):
        figures.add_column(name, justify="right", no_wrap=True)
    plans = Table.grid(padding=(0, 2))
    plans.add_column(no_wrap=True)
    plans.add_column(overflow="fold")
    for answer in answers:
        style = None if answer.fits else "dim"
        figures.add_row(answer.planner, *_figures(answer), style=style)
        name = "none" if answer.candidate is None else answer.candidate.words
        words = Text(name, style="bold" if answer.fits else "")
        passed_over = f"; {answer.passed_over} before it do not fit" if answer.passed_over else ""
        words.append(f"\n{answer.reason}{passed_over}", style="not bold dim")
        plans.add_row(answer.planner, words, style=style)
    return Group(figures, "", plans)


def _figures(answer: Answer) -> tuple[str, ...]:
    prediction = answer.prediction
    behind = "does not fit" if answer.step_s is not None else "-"
    if answer.behind is not None:
        behind = f"+{answer.behind:.1%}" if answer.behind else "best"
    candidate = answer.candidate
    peak_bytes = 0 if candidate is None else candidate.peak_bytes
    return (
        _seconds(answer.step_s),
        behind,
        "-" if prediction is None else prediction.interval,
        _seconds(None if candidate is None else candidate.estimate_s),
        format_bytes(peak_bytes) if peak_bytes else "-",
        format_seconds(answer.search_s),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def print_ranking(planned: PlannedJob, shown: Sequence[Advised]) -> None:
    """Print the shown candidates with their reasons, and the memory of each rank under the best one."""
    out = console()
    out.print("", plans_table(shown, planned.problem.job.cluster), sep="\n")
    out.print(memory_bars(planned.prediction.peak_bytes, planned.memory_bytes))


def budgeted(run: RunFile, budget_s: float) -> Planner:
    """Return the planner of a run file with a budget; it prints its best plan so far to standard error.

    Searches in several precisions share the budget equally.

    Raises:
        InputError: if the budget is not positive and finite, or the planner accepts none.
    """
    if not 0.0 < budget_s < inf:
        problem = f"{budget_s:g}: a search needs some seconds"
        raise InputError(Violation("--budget-seconds", problem, "10"))
    planner = get_planner(run.plan.planner or DEFAULT_PLANNER)
    if not isinstance(planner, WeftPlanner):
        problem = f"{planner.name} has no budget; its search takes as long as it takes"
        raise InputError(Violation("--budget-seconds", problem, "--planner weft"))
    searches = max(1, len(precisions_of(run)))
    return replace(planner, budget_s=budget_s / searches, tell=lambda text: print(text, file=sys.stderr))


def planned_visibly(
    run: RunFile, budget: Planner | None = None, problem: Problem | None = None
) -> PlannedJob:
    """Plan a run file; a terminal is told the progress of its planner and the best plan so far.

    `budget` is a planner with a budget, which tells by itself.

    Raises:
        InputError: see `plan_run`.
    """
    planner = budget or get_planner(run.plan.planner or DEFAULT_PLANNER)
    with searching() as (tell, progress):
        if budget is None and isinstance(planner, WeftPlanner):
            planner = replace(planner, tell=tell, report=progress)
        return plan_run(run, problem=problem, planner=planner)


def show_comparison(run: RunFile, names: str, *, out: Path | None, json: bool) -> None:
    """Run the planners in `names` (with commas), show their answers, write the best plan to `out`, if given.

    Raises:
        InputError: if there is no name or an unknown one, or no planner's plan fits.
    """
    problem = problem_of_run(run)
    answers = compared(run, problem, named_planners(names), out)
    if json:
        print_json(comparison_record(problem, answers))
        return
    print_comparison(problem, answers)
    say_written(out)


def named_planners(names: str) -> list[Planner]:
    """Return the planners of names separated by commas, each once.

    Raises:
        InputError: if there is no name or an unknown one.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise InputError(Violation("--compare", "names no planner", "homogeneous,amp"))
    return [get_planner(name) for name in dict.fromkeys(wanted)]


def compared(
    run: RunFile, problem: Problem, planners: Sequence[Planner], out: Path | None
) -> tuple[Answer, ...]:
    """Run planners and return their answers, best first; write the best plan to `out`, if given.

    Raises:
        InputError: if no planner's plan fits.
    """
    with progressing(f"searching with {', '.join(one.name for one in planners)}") as report:
        answers = compare_planners(problem, planners, report)
    if not any(answer.fits for answer in answers):
        raise InputError([Violation(f"{one.planner}: no layout fits", one.reason) for one in answers])
    best = answers[0].candidate
    if best is not None and best.plan is not None:
        write_asked([(out, decided_file(run, problem, best).to_json)])
    return answers


def comparison_record(problem: Problem, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the assumptions of a problem and the answer of each planner as a record for JSON."""
    return {
        "assumed": dict(problem.assumed),
        "kept_out": kept_out_record(problem),
        "answers": [answer_record(one) for one in answers],
    }


def print_comparison(problem: Problem, answers: Sequence[Answer]) -> None:
    """Print the problem, and the best plan of each planner."""
    print_problem(problem)
    console().print(answers_table(answers))


def print_problem(problem: Problem) -> None:
    """Print the job, its assumptions, and the moves that its contract excludes."""
    out = console()
    out.print(job_text(problem))
    for key, text in problem.assumed.items():
        out.print(f"[dim]assumed {key.replace('_', ' ')}: {text}[/dim]")
    for move, contract in kept_out_record(problem).items():
        out.print(f"[dim]kept out by contract {problem.contract.word}: {move}, which is {contract}[/dim]")
