"""What benchmarks share: their options, the report of their figures, and repeated timings.

def options() -> argparse.ArgumentParser:
    return parser(__doc__)

def main() -> None:
    report = Report("name", options().parse_args())
    report.print_machine()
    report.time("what is timed", call, target_s=0.3)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from figures import Figure, Record, Row, Value, Watch

STANDARD_OUTPUT = "-"

Worker = Callable[["Report", argparse.Namespace], None]


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--json",
        metavar="FILE",
        type=lambda text: text if text == STANDARD_OUTPUT else str(Path(text).resolve()),
        help="add every figure to this file as a line of JSON when it is there, and leave out cells that "
        "it has of this commit and machine; - writes the lines to the standard output",
    )
    made.add_argument("--again", action="store_true", help="measure what the file has, too")
    return made


def quick_parser(documentation: str | None) -> argparse.ArgumentParser:
    """The same, of a benchmark that also has a short form."""
    made = parser(documentation)
    made.add_argument("--quick", action="store_true")
    return made


def parser_of_ranks(documentation: str | None, ranks: int | None = None) -> argparse.ArgumentParser:
    """The same, of a benchmark that starts itself as ranks; `ranks`: how many, where `--ranks` may say so."""
    made = parser(documentation)
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if ranks is not None:
        made.add_argument("--ranks", type=int, default=ranks)
    return made


def parser_of_trainings(documentation: str | None, steps: int) -> argparse.ArgumentParser:
    """The options of a benchmark of trainings on ranks; `steps`: of each, unless `--steps` says otherwise."""
    made = parser_of_ranks(documentation)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--quick", action="store_true")
    return made


def words_for_workers(asked: argparse.Namespace) -> list[str]:
    """The options of `parser` for a process that this one starts."""
    words = [] if asked.json is None else ["--json", asked.json]
    return [*words, "--again"] if asked.again else words


def launch(script: str, ranks: int, asked: argparse.Namespace, *words: str) -> int:
    """Run `script --worker`, with these words, on so many ranks of this machine; return the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, script, "--worker", *words, *words_for_workers(asked)], check=False
    ).returncode


def run_on_ranks(script: str, asked: argparse.Namespace, worker: Callable[[Report], None]) -> int:
    """Run `worker` in a worker, else `script` on the ranks that its options ask for; return the exit code."""
    report = Report(Path(script).stem, asked)
    if asked.worker:
        worker(report)
        return 0
    report.print_machine()
    return launch(script, asked.ranks, asked)


def run_trainings(script: str, ranks: int, asked: argparse.Namespace, worker: Worker, *more: str) -> int:
    """Run `worker` in a worker, else `script` with `more` options on so many ranks; return the exit code."""
    report = Report(Path(script).stem, asked)
    if asked.worker:
        worker(report, asked)
        return 0
    report.print_machine()
    words = ["--steps", str(asked.steps), *(["--quick"] if asked.quick else [])]
    return launch(script, ranks, asked, *words, *more)


def print_machine() -> None:
    """One line about the machine, one about the versions."""
    print(*Watch().look().lines(), sep="\n", flush=True)


class Report:
    """The figures of one benchmark: readable lines, and rows of the file that `--json` names.

    What the file has of this commit and machine is known from the beginning, so that a rerun continues.
    """

    def __init__(self, benchmark: str, asked: argparse.Namespace) -> None:
        self._benchmark, self._watch = benchmark, Watch()
        to_output = asked.json == STANDARD_OUTPUT
        self._text = sys.stderr if to_output else sys.stdout
        self._lines = sys.stdout if to_output else None
        self._record = None if asked.json is None or to_output else Record(Path(asked.json))
        self._known: dict[str, Figure] = {}
        if self._record is not None and not asked.again:
            here = self._watch.look()
            self._known = {
                figure.name: figure
                for figure, machine in self._record.rows()
                if figure.benchmark == benchmark
                and (machine.commit, machine.place) == (here.commit, here.place)
            }

    def print_machine(self) -> None:
        """Two lines about the machine and the versions, and how much is known already."""
        self.say("\n".join(self._watch.look().lines()))
        if self._known:
            self.say(f"{len(self._known)} figures are in the file; --again measures them, too")

    def say(self, text: str) -> None:
        """Print what is no figure."""
        print(text, file=self._text, flush=True)

    def missing(self, cell: str) -> bool:
        """Whether a cell is still to be measured."""
        return not any(name == cell or name.startswith(f"{cell}: ") for name in self._known)

    def value(self, name: str) -> float:
        """A figure that was measured before, by this process or by an earlier one."""
        return self._known[name].value

    def values(self, cell: str) -> dict[str, float]:
        """What is known of a cell, by what it says."""
        return {
            name.removeprefix(f"{cell}: "): figure.value
            for name, figure in self._known.items()
            if name.startswith(f"{cell}: ")
        }

    def time(
        self, name: str, call: Callable[[], object], repeats: int = 5, target_s: float | None = None
    ) -> None:
        """Median seconds of `call` as a cell, if it is missing."""
        if self.missing(name):
            self.add(name, timed(call, repeats, target_s))

    def add(self, name: str, found: Value) -> None:
        """A cell of one figure."""
        self._write([Figure.of(self._benchmark, name, found)])

    def add_cell(self, cell: str, found: Mapping[str, Value]) -> None:
        """A cell of several figures, by what they say."""
        self._write([Figure.of(self._benchmark, f"{cell}: {what}", one) for what, one in found.items()])

    def add_outcome(self, cell: str, cases: int, failed: int, **more: Value) -> None:
        """A cell of a matrix: how many cases it has, and how many of them failed."""
        self.add_cell(cell, {"cases": Value(cases, "count"), "failed": Value(failed, "count", 0), **more})

    def _write(self, figures: list[Figure]) -> None:
        """Leave out what is known: a rerun sums cells up once more."""
        machine = self._watch.look()
        rows = [Row(figure, machine) for figure in figures if self._known.get(figure.name) != figure]
        self._known |= {figure.name: figure for figure in figures}
        busy = f"  [busy: {machine.busy}]" if machine.busy else ""
        for figure, _ in rows:
            verdict = f"  (target {figure.verdict()})" if figure.verdict() else ""
            self.say(f"{figure.name:<64} {figure.shown():>12}{verdict}{busy}")
        if self._lines is not None and rows:
            print(*(row.to_json() for row in rows), sep="\n", file=self._lines, flush=True)
        if self._record is not None:
            self._record.append(rows)


def python_sources(size: int) -> bytes:
    """The first bytes of the sources of Python's standard library, in the order of their names."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return b"\n".join(one.read_bytes() for one in sources)[:size]


def file_at(clone: Path, commit: str, path: str) -> bytes:
    """Return a file of a clone, which may be bare, at a commit."""
    command = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def timed(call: Callable[[], object], repeats: int = 5, target_s: float | None = None) -> Value:
    """Median seconds of `call` and their spread; the first call is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Value.of_repeats(seconds, "s", target_s)


def peak_bytes(process: int | None = None) -> int:
    """The most memory that a process has held, by default this one.

    Raises:
        OSError: if the process has ended, or the system has no `/proc`.
    """
    # `getrusage` would count the parent's memory, too.
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process or 'self'}/status").read_text())
    if found is None:
        raise ProcessLookupError(f"process {process} has ended")
    return 1024 * int(found[1])
