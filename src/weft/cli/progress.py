"""Progress of a run in the terminal: one line per report, predicted next to measured.

The launcher owns the terminal: it reads the metrics that the workers write.
"""

from __future__ import annotations

import shlex
import sys
import time

from weft.describe.run_file import load_run
from weft.describe.units import format_count, format_seconds
from weft.training.directory.run_directory import RunDirectory, warnings

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """A printer of the newest metrics every two seconds; with `quiet`, only of warnings at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._directory: RunDirectory | None = None
        self._printed_step = -1
        self._printed_time = 0.0
        self._begun_s = time.time()
        self._warned = 0

    def update(self, directory: RunDirectory) -> None:
        """Print news of a run; the launcher calls this several times a second while the workers run."""
        if self._directory is None:
            self._directory = directory
            self._say(f"run directory: {directory.path}")
            if load_run(directory.path / "run.toml").train.compile:
                self._say("layers are compiled before the first step; the prediction is for uncompiled ones")
        if not self._quiet and time.monotonic() - self._printed_time >= SECONDS_BETWEEN_LINES:
            self._print_newest()
            self._print_warnings()

    def finish(self) -> None:
        """Print the last step if it was not printed, all new warnings, and the problems of loggers."""
        if self._directory is None:
            return
        if not self._quiet:
            self._print_newest()
        self._print_warnings()
        for problem in self._directory.logger_problems():
            print(f"warning: {problem}", file=sys.stderr)

    def resume_hint(self) -> None:
        """Print the command that resumes the run."""
        if self._directory is not None:
            path = shlex.quote(str(self._directory.path))
            print(f"resume with: weft train {path}", file=sys.stderr)

    def _print_newest(self) -> None:
        assert self._directory is not None, "update was called before"
        rows = self._directory.metrics()
        if not rows or rows[-1]["step"] == self._printed_step:
            return
        row = rows[-1]
        self._printed_step, self._printed_time = row["step"], time.monotonic()
        # The prediction of the current plan: a later plan may have taken over.
        predicted_s = self._directory.prediction().step_s
        self._say(
            f"step {row['step']:>5}  loss {row['loss']:.4f}  predicted {format_seconds(predicted_s)} | "
            f"measured {format_seconds(row['step_s'])}  {format_count(row['tokens_per_s'])} tokens/s"
        )

    def _print_warnings(self) -> None:
        assert self._directory is not None, "update was called before"
        told = warnings(self._directory, self._begun_s)
        for text in told[self._warned :]:
            print(f"warning: {text}", file=sys.stderr)
        self._warned = len(told)

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)
