"""Answers of `weft explain` and `weft score --trace` on traces of whole jobs."""

from __future__ import annotations

from pathlib import Path

from weft.cli.output import console, named_table, print_json, say_written, write_asked
from weft.describe.units import counted, format_seconds
from weft.doors.trace.job.files import read_job
from weft.doors.trace.job.losses import Losses, losses_of
from weft.doors.trace.job.operations import Operations
from weft.doors.trace.job.remarks import remarks
from weft.doors.trace.job.score import replay_figures
from weft.errors import InputError, Violation
from weft.timeline.figures import error_text
from weft.web.pages.job import group_rows, job_page, what_if_bars


def explain_job(operations: Operations, report: Path | None, *, json: bool) -> None:
    """Print what a job's steps lose, and write the page that is asked for."""
    losses = losses_of(operations)
    write_asked([(report, lambda: job_page(losses))])
    if json:
        print_json({**losses.record(), "says": remarks(losses)})
        return
    _print_job(losses)
    say_written(report)


def score_trace(path: Path, *, json: bool) -> None:
    """Print the errors of the simulator on the steps of a trace.

    Raises:
        InputError: when the file holds no trace of a job.
    """
    operations = read_job(path)
    if operations is None:
        problem = "no trace of a job, operation by operation"
        raise InputError(Violation(str(path), problem, "a file as docs/doors.md describes it"))
    figures = replay_figures(losses_of(operations))
    if json:
        print_json({"trace": {name: one.as_record() for name, one in figures.items()}})
        return
    table = named_table(("simulated from", "steps", "error", "median", "worst", "spearman"))
    for name, one in figures.items():
        errors = (f"{value or 0.0:.1%}" for value in (one.mape, one.median_ape, one.max_ape))
        table.add_row(name, str(one.n), *errors, "-" if one.spearman is None else f"{one.spearman:.3f}")
    console().print(table)


def _print_job(losses: Losses) -> None:
    out, operations, program = console(), losses.operations, losses.implied.program
    order = f", order {program.schedule}" if program.schedule else ""
    out.print(
        f"[bold]trace[/bold] of a job: {counted(operations.stages, 'stage')}, "
        f"{counted(operations.replicas, 'replica')}, {counted(program.ranks, 'rank')}{order}; "
        f"{counted(len(operations.steps), 'step')} of {len(program)} instructions"
    )
    measured_s, simulated_s = float(losses.measured_s.mean()), float(losses.simulated_s.mean())
    out.print(
        f"measured {format_seconds(measured_s)}, simulated {format_seconds(simulated_s)} "
        f"({error_text(simulated_s / measured_s - 1.0)}), ideal {format_seconds(losses.ideal_s)}"
    )
    if len(losses.compared) < len(operations.steps):
        out.print(f"groups and changes are those of {len(losses.compared)} steps at equal distances")
    changes = named_table(("what if", "step"))
    for bar in what_if_bars(losses):
        changes.add_row(bar.name, bar.text)
    groups = named_table(("alone as recorded", "step against an ideal one"))
    for row in group_rows(losses):
        groups.add_row(*row)
    out.print(changes)
    out.print(groups)
    for line in (*remarks(losses), *operations.left_out):
        out.print(line, markup=False, soft_wrap=True)
