"""The answer of `weft plan --from`: a running job on the devices that remain."""

from __future__ import annotations

from pathlib import Path

from weft.cli.output import console, print_json, progressing, say_written, write_asked
from weft.cli.tables.replanning import replanning_record, replanning_table
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.planning.plan_file_job import plan_file_job
from weft.planning.planned import decided_file
from weft.planning.replanning import Replanning, replan


def show_replanning(path: Path, words: list[str] | None, *, out: Path | None, json: bool) -> None:
    """Show the plans of a plan file's or run's job without what `words` name; `out` receives the chosen one.

    Raises:
        InputError: without words, for a broken plan file, and as `replan` does.
    """
    if not words:
        problem = "missing: --from plans again without something, by its name or rank"
        raise InputError(Violation("--without", problem, "device 0"))
    before = plan_file_job(path / "plan.json" if path.is_dir() else path)
    with progressing("planning again") as progress:
        replanning = replan(before, words, progress)
    file = decided_file(replanning.run, replanning.problem, replanning.chosen.candidate)
    write_asked([(out, file.to_json)])
    if json:
        print_json(replanning_record(replanning))
        return
    _print(replanning)
    say_written(out)


def _print(replanning: Replanning) -> None:
    before, out = replanning.before, console()
    step = format_seconds(before.prediction.step_s)
    out.print(f"before   {before.plan.words}, on {before.plan.cluster}: step {step}", highlight=False)
    out.print(f"now on   {replanning.problem.job.cluster.name}", highlight=False)
    moved = replanning.chosen.moved
    lost = f" ({format_bytes(moved.lost_bytes)} lost with the devices)" if moved.lost_bytes else ""
    words = f"it moves the fewest bytes of states, {format_bytes(moved.total_bytes)}{lost}"
    out.print(f"chosen   the first plan: {words}", highlight=False)
    if len(replanning.front) > 1:
        out.print("A plan below it has paid for its further bytes after its break-even step.")
    out.print("", replanning_table(replanning), sep="\n")
    for way, reason in replanning.refused.items():
        out.print(f"[dim]{way} found nothing: {reason}[/dim]")
    if replanning.assumed is not None:
        out.print(f"[dim]assumed: {replanning.assumed}[/dim]")
    for key, text in replanning.problem.assumed.items():
        out.print(f"[dim]assumed {key.replace('_', ' ')}: {text}[/dim]")
