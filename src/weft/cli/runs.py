"""Commands about runs: `train`, `eval`, `compare`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from weft.api import Run, evaluate, finished, train_in
from weft.cli.codecs import codec_record, codecs_of_run, print_codecs
from weft.cli.output import Flag, Json, console, print_json, print_warnings, progressing, refuse_options
from weft.cli.rankings import planned_visibly
from weft.cli.tables.plans_side_by_side import side_by_side_record, side_by_side_table
from weft.describe.reading import holds_json
from weft.describe.run_file import load_run
from weft.describe.units import counted, format_count, format_seconds
from weft.doors.emit.own_run import start_commands
from weft.errors import InputError, RunError, Violation
from weft.planning.report_sections import BY_SOURCE
from weft.run.launch.workers import require_torch
from weft.timeline.compare import Comparison, Pair
from weft.timeline.compare import compare as compare_timelines
from weft.timeline.figures import error_text, prediction_error
from weft.training.checkpoint.manifest import CHECKPOINTS, generations
from weft.training.directory.event_words import warnings
from weft.training.directory.live_run import LiveRun
from weft.training.directory.overview import NEWEST_STEPS
from weft.training.directory.plans_at_hand import known_plans
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import job_in, job_to_train, prepare, source_at

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """A printer of the newest metrics every two seconds; with `quiet`, only of warnings at the end.

    `unit` names the parts of samples that the speed counts.
    """

    def __init__(self, *, quiet: bool, unit: str) -> None:
        self._quiet, self._unit = quiet, unit
        self._run: LiveRun | None = None
        self._printed_step = -1
        self._printed_time = 0.0
        self._begun_s = time.time()
        self._warned = self._steps = 0

    @property
    def begun(self) -> bool:
        """True if workers have run: a finished run starts none."""
        return self._run is not None

    def update(self, directory: RunDirectory) -> None:
        """Print news of a run; the launcher calls this several times a second while the workers run."""
        if self._run is None:
            self._run = LiveRun(directory.path)
            self._say(f"run directory: {directory.path}")
            trained = load_run(directory.path / "run.toml").train
            self._steps = trained.steps
            if trained.compile:
                self._say(
                    "layers are compiled before the first step; the prediction has the kernels of plain ones"
                )
        if not self._quiet and time.monotonic() - self._printed_time >= SECONDS_BETWEEN_LINES:
            self._print_news(self._run)

    def finish(self) -> None:
        """Print the last step if it was not printed, all new warnings, and the problems of loggers."""
        if self._run is None:
            return
        self._print_news(self._run)
        print_warnings(RunDirectory(self._run.path).logger_problems())

    def resume_hint(self, *, failed: bool) -> None:
        """Print the command that resumes the run, or starts it again if it has no checkpoint.

        A run that `failed` before it resumed may have damaged checkpoints alone, so nothing is printed.
        """
        if self._run is None:
            return
        self._run.look()
        path = self._run.path
        command = f"weft train {shlex.quote(str(path))}"
        now = {event.get("event") for event in self._run.events if event.get("time_s", 0.0) >= self._begun_s}
        if not generations(path / CHECKPOINTS) and load_run(path / "run.toml").checkpoint.url is None:
            print(f"no checkpoint yet; start again with: {command}", file=sys.stderr)
        elif not failed or now & {"resumed", "checkpoint"}:
            print(f"resume with: {command}", file=sys.stderr)

    def _print_news(self, run: LiveRun) -> None:
        run.look()
        if not self._quiet:
            self._print_newest(run)
        told = warnings(run.events, self._begun_s)
        print_warnings(told[self._warned :])
        self._warned = len(told)

    def _print_newest(self, run: LiveRun) -> None:
        # Steps of an earlier start may be of another plan than the prediction.
        newest = [one for one in run.steps[-NEWEST_STEPS:] if one.time_s >= self._begun_s]
        if not newest or newest[-1].step == self._printed_step:
            return
        last, steps = newest[-1], self._steps
        self._printed_step, self._printed_time = last.step, time.monotonic()
        left = (steps - last.step - 1) * median(one.step_s for one in newest)
        # The prediction of the current plan: a later plan may have taken over.
        prediction = run.file.prediction
        assert prediction is not None, "a prepared run says what is predicted of it"
        self._say(
            f"step {last.step + 1:>{len(str(steps))}}/{steps}  loss {last.loss:.4f}  "
            f"predicted {format_seconds(prediction.step_s)} | measured {format_seconds(last.step_s)}  "
            f"{format_count(last.tokens_per_s)} {self._unit}/s  {format_seconds(left)} left"
        )

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


# The entries of an evaluation that are not figures of the model.
NO_FIGURES = ("step", "samples", "held_out_samples")


def train(
    source: str,
    /,
    *,
    model: str | None = None,
    on: str | None = None,
    steps: int | None = None,
    data: str | None = None,
    directory: Path | None = None,
    resume: str | None = None,
    prepare_only: Flag = False,
    watch: Flag = False,
    json: Json = False,
) -> None:
    """Train a run file or a plan file here, or resume a run directory.

    A stop prints the command that resumes the run, or starts it again.

    - `weft train run.toml`
    - `weft train plan.json`
    - `weft train runs/run`
    - `weft train changed.toml --resume runs/run`

    Parameters
    ----------
    source
        A RUN.toml, a PLAN.json, or the directory of a run to resume. Also the URL to which a lost run's
        checkpoints were copied (s3://bucket/runs/NAME-1f3a90c2): its directory comes back under runs/.
    model
        Train this model instead: a preset or a folder with a config.json.
    on
        Plan for this cluster instead, or use the plan there: this-machine, an expression, or a CLUSTER.toml.
    steps
        Train this many steps in all.
    data
        Train on this instead of the run file's data.
    directory
        The folder for the run; default: a new folder under runs/.
    resume
        Resume this run directory, or URL, with SOURCE: another plan, but the same model, data and seed.
    prepare_only
        Write the run directory and stop; torchrun or another launcher then starts its workers.
    watch
        Serve a live page of the run until it ends; its address is printed.
    """
    job_or_run = source_at(source)
    if not job_or_run.exists():
        raise InputError(Violation(source, "no such run file, plan file or run directory"))
    if prepare_only:
        refuse_options({"--watch": watch or None}, "only while the run trains here, not with --prepare-only")
    else:
        require_torch()
    planned, path = job_to_train(
        job_or_run,
        model=model,
        on=on,
        data=data,
        steps=steps,
        directory=directory,
        resume=None if resume is None else source_at(resume),
        plan_by=planned_visibly,
    )
    if prepare_only:
        with (
            progressing("planning for fewer nodes") as report,
            prepare(planned, path, report) as prepared,
        ):
            _tell_plans_at_hand(prepared)
            print(*start_commands(planned, shlex.quote(str(path))), sep="\n")
        return
    progress = Progress(quiet=json, unit=planned.problem.model.unit)
    try:
        with _polled(progress, watch=watch) as on_poll:
            run = train_in(planned, path, on_poll)
    except (RunError, KeyboardInterrupt, SystemExit) as stop:
        for note in getattr(stop, "__notes__", ()):
            print(f"weft: {note}", file=sys.stderr)
        progress.resume_hint(failed=isinstance(stop, RunError))
        raise
    progress.finish()
    if json:
        print_json(dict(run.summary))
        return
    if progress.begun:
        _print_figures(run)
    steps = run.summary["steps"]
    command = f"weft train {shlex.quote(str(run.directory))} --steps {2 * steps}"
    done = "the only step is done" if steps == 1 else f"all {steps} steps are done"
    console().print(f"{done}; train on with: {command}", soft_wrap=True)
    table = planned.run.optimizer
    if table.schedule != "constant" and table.decay_steps is None:
        line = f"it raises the learning rate: its {table.schedule} decay then ends at step {2 * steps}"
        console().print(f"{line}; optimizer.decay_steps = {steps} keeps it", soft_wrap=True)


def _tell_plans_at_hand(directory: RunDirectory) -> None:
    """Tell on the error stream what a step takes with so many ranks; the output has commands alone."""
    for ranks, (plan, prediction, _) in known_plans(directory).items():
        assert prediction is not None, "plans at hand were predicted"
        step = format_seconds(prediction.step_s)
        print(f"with {counted(ranks, 'rank')}: predicted step {step}, {plan.words}", file=sys.stderr)


def _print_figures(run: Run) -> None:
    summary = run.summary
    console().print(
        f"held-out loss {summary['first_loss']:.3f} -> {summary['final_loss']:.3f} per target; step "
        f"predicted {format_seconds(summary['predicted_step_s'])}, "
        f"measured {format_seconds(summary['measured_step_s'])} "
        f"(error {error_text(prediction_error(summary['predicted_step_s'], summary['measured_step_s']))}), "
        f"{interval_text(summary)}"
    )
    if compressed := codecs_of_run(run.directory):
        print_codecs(*compressed)
    console().print(f"report: {run.directory / 'report.html'}", soft_wrap=True)


@contextmanager
def _polled(progress: Progress, *, watch: bool) -> Iterator[Callable[[RunDirectory], None]]:
    """Yield the function that the launcher calls; with `watch`, it also opens the live page."""
    if not watch:
        yield progress.update
        return
    # The server needs half a second of imports.
    from weft.watch.beside import PageBeside

    with PageBeside() as page:

        def update(directory: RunDirectory) -> None:
            page.show(directory.path)
            progress.update(directory)

        yield update


def interval_text(summary: Mapping[str, Any]) -> str:
    """Return the interval of a finished run's prediction, and on which side of it the measured step is."""
    low_s, high_s = summary["predicted_step_low_s"], summary["predicted_step_high_s"]
    where = "inside" if low_s <= summary["measured_step_s"] <= high_s else "outside"
    return f"{where} the 90 % interval {format_seconds(low_s)} - {format_seconds(high_s)}"


def eval_(directory: Path, /, *, json: Json = False) -> None:
    """Evaluate a run's newest checkpoint on held-out data.

    The ranks are those of its plan.

    Language models get a perplexity, image models an accuracy. Data of several sources is also evaluated
    source by source.

    - `weft eval runs/demo`

    Parameters
    ----------
    directory
        A run directory with a checkpoint.
    """
    with progressing("evaluating") as report:
        result = dict(evaluate(directory, report=report))
    if json:
        print_json(result)
        return
    console().print(
        f"step {result['step']}, {result['samples']} of {result['held_out_samples']} held-out samples: "
        f"{_figures(result)}"
    )
    for name, one in result.get(BY_SOURCE, {}).items():
        console().print(f"  {name}: {_figures(one)}", soft_wrap=True)


def _figures(result: Mapping[str, Any]) -> str:
    figures = {name: value for name, value in result.items() if name not in NO_FIGURES}
    return ", ".join(f"{name} {one:.4g}" for name, one in figures.items() if isinstance(one, int | float))


def compare(
    first: Path,
    second: Path | None = None,
    /,
    *,
    model: str | None = None,
    on: str | None = None,
    json: Json = False,
) -> None:
    """Compare prediction with measurement, two runs, or two plans.

    - `weft compare runs/demo`
    - `weft compare runs/demo runs/demo-2`
    - `weft compare plan.json other.json`
    - `weft compare plan.json --on 64xh100-80gb`

    Parameters
    ----------
    first
        A run directory or a PLAN.json.
    second
        Another one: a run's measurement is compared with the first run's, or with the plan's prediction.
    model
        Compare a plan with itself for this model: a preset or a folder with a config.json.
    on
        Compare a plan with itself on this cluster: an expression such as 64xa100-80gb, or a CLUSTER.toml.
    """
    moves = {"--model": model, "--on": on}
    if _is_plan(first) and (second is None or _is_plan(second)):
        if second is None and model is None and on is None:
            raise InputError(Violation(str(first), "with what? give another plan, a run, --on or --model"))
        one, two = job_in(first), job_in(second or first, model=model, on=on)
        if json:
            print_json(side_by_side_record(one, two))
        else:
            console().print(side_by_side_table(one, two), highlight=False)
        return
    refuse_options(moves, "only with plans; a run has its model and cluster")
    comparison = _comparison_with_a_run(first, second)
    compressed = codecs_of_run(first) if second is None else None
    if json:
        print_json({**comparison.record(), **(codec_record(*compressed) if compressed else {})})
    else:
        console().print(comparison.text())
        if second is None:
            print(f"measured step: {interval_text(finished(first).summary)}")
        if compressed:
            print_codecs(*compressed)


def _is_plan(path: Path) -> bool:
    return path.suffix == ".json" or (path.is_file() and holds_json(path))


def _comparison_with_a_run(first: Path, second: Path | None) -> Comparison:
    if second is not None and (_is_plan(first) or _is_plan(second)):
        plan, path = (first, second) if _is_plan(first) else (second, first)
        run, planned = RunDirectory(finished(path).directory), job_in(plan)
        if planned.plan.model_fingerprint != run.plan().model_fingerprint:
            problem = f"a plan for {planned.plan.model}; {path} trained {run.plan().model}"
            raise InputError(Violation(str(plan), problem))
        predicted = planned.predicted
        step = Pair(predicted_s=predicted.prediction.step_s, measured_s=run.summary()["measured_step_s"])
        return compare_timelines(predicted.simulation.timeline, run.measured(), step=step)
    run = RunDirectory(finished(first).directory)
    return run.compare(None if second is None else RunDirectory(finished(second).directory))
