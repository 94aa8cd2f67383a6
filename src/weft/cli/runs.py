"""Commands about runs: `train`, `eval`, `compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.api import evaluate, finished, prepared
from weft.api import train as train_run
from weft.cli.output import Json, console, print_json
from weft.cli.progress import Progress
from weft.describe.units import format_seconds
from weft.errors import InputError, RunError, Violation
from weft.timeline.figures import error_text, prediction_error
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import WORKER_MODULE

# The entries of an evaluation that are not figures of the model.
NO_FIGURES = ("step", "samples", "held_out_samples")


def train(
    source: Path,
    /,
    *,
    steps: int | None = None,
    data: str | None = None,
    directory: Path | None = None,
    resume: Path | None = None,
    prepare_only: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> None:
    """Plan a run file and train it on this machine, or resume a run directory.

    Every stop prints the command that resumes the run.

    Example: weft train run.toml

    Example: weft train runs/run

    Example: weft train changed.toml --resume runs/run

    Parameters
    ----------
    source
        A RUN.toml, or the directory of a run to resume.
    steps
        Train this many steps in all.
    data
        Train on this instead of the run file's data.
    directory
        The folder for the run; default: a new folder under runs/.
    resume
        Resume this run directory with RUN.toml: another plan, but the same model, data and seed.
    prepare_only
        Write the run directory and stop; torchrun or another launcher then starts its workers.
    """
    if not source.exists():
        raise InputError(Violation(str(source), "no such run file or run directory"))
    if prepare_only:
        planned, run_directory = prepared(source, data=data, steps=steps, directory=directory, resume=resume)
        ranks = planned.plan.ranks
        print(f"torchrun --nproc-per-node {ranks} -m {WORKER_MODULE} {run_directory.path}")
        return
    progress = Progress(quiet=json)
    try:
        run = train_run(
            source, data=data, steps=steps, directory=directory, resume=resume, on_poll=progress.update
        )
    except (RunError, KeyboardInterrupt, SystemExit) as stop:
        for note in getattr(stop, "__notes__", ()):
            print(f"weft: {note}", file=sys.stderr)
        progress.resume_hint()
        raise
    progress.finish()
    if json:
        print_json(dict(run.summary))
        return
    summary = run.summary
    console().print(
        f"held-out loss {summary['first_loss']:.3f} -> {summary['final_loss']:.3f} nats per target; step "
        f"predicted {format_seconds(summary['predicted_step_s'])}, "
        f"measured {format_seconds(summary['measured_step_s'])} "
        f"(error {error_text(prediction_error(summary['predicted_step_s'], summary['measured_step_s']))})"
    )
    console().print(f"report: {run.directory / 'report.html'}", soft_wrap=True)
    progress.resume_hint()


def eval_(directory: Path, /, *, json: Json = False) -> None:
    """Evaluate a run's newest checkpoint on held-out data, on the ranks of its plan.

    Language models get a perplexity, image models an accuracy.

    Example: weft eval runs/demo

    Parameters
    ----------
    directory
        A run directory with a checkpoint.
    """
    result = dict(evaluate(directory))
    if json:
        print_json(result)
        return
    figures = [f"{name} {result[name]:.4g}" for name in result if name not in NO_FIGURES]
    console().print(
        f"step {result['step']}, {result['samples']} of {result['held_out_samples']} held-out samples: "
        f"{', '.join(figures)}"
    )


def compare(first: Path, second: Path | None = None, /, *, json: Json = False) -> None:
    """Compare a run's prediction with its measurement, or two runs.

    Example: weft compare runs/demo

    Example: weft compare runs/demo runs/demo-2

    Parameters
    ----------
    first
        A run directory.
    second
        Another run directory: its measurement is compared with the first run's.
    """
    run = RunDirectory(finished(first).directory)
    comparison = run.compare(None if second is None else RunDirectory(finished(second).directory))
    if json:
        print_json(comparison.record())
    else:
        console().print(comparison.text())


COMMANDS = (train, eval_, compare)
