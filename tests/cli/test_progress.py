"""What a terminal is told while a command works: how much is done, of how much, and the time left."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pool import WorkerPool
from pooled_runs import trained

from weft.cli.main import run
from weft.cli.output import progressing
from weft.progress import CountedWork

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

PLAN = ("plan", "gpt2", "--on", "8xa100-80gb")


RUN = """
[model]
preset = "gpt-1m"
[task]
data = "text.txt"
sequence = 16
[train]
global_batch = 8
steps = 2
precision = "fp32"
[plan]
pp = 1
dp = 1
"""


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """Return what a command writes to standard output, and to a terminal as standard error."""
    mine, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "weft", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        told = all_told(mine)
        assert process.stdout is not None
        written = process.stdout.read()
    assert process.returncode == 0
    return written.decode(), told


def all_told(terminal: int) -> str:
    told = b""
    try:
        while part := os.read(terminal, 1 << 16):
            told += part
    except OSError:
        pass  # the other end is closed
    os.close(terminal)
    return told.decode()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], str]:
    """A function that calls another with a terminal as standard error, and returns what it is told."""

    def call(function: Callable[[], object]) -> str:
        mine, theirs = pty.openpty()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        with ThreadPoolExecutor(1) as beside:
            # A terminal that nobody reads would soon be full.
            told = beside.submit(all_told, mine)
            with monkeypatch.context() as context, os.fdopen(theirs, "w") as terminal:
                context.setattr("sys.stderr", terminal)
                function()
            return told.result()

    return call


def test_a_terminal_is_told_of_the_search_and_its_best_plan() -> None:
    written, told = on_a_terminal(*PLAN)
    assert "searching layouts" in told
    assert "best so far" in told
    assert re.search(r"bounded: [\d.]+( k)?/[\d.]+ k layouts, [\d.]+ \w+ left", told)
    assert "searching" not in written
    assert "best     " in written


OPEN_RUN = f"{RUN.partition('[plan]')[0]}[cluster]\nuse = 'this-machine'\n"


@pytest.mark.parametrize(
    "command", ["train RUN --prepare-only", "simulate RUN", "simulate RUN --ranks 2", "show RUN", "check RUN"]
)
def test_a_terminal_is_told_of_the_search_of_every_command_that_plans_a_run(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: Callable[[Callable[[], object]], str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("the weft goes under and over the warp\n" * 400)
    (tmp_path / "run.toml").write_text(OPEN_RUN)
    ended = []
    told = here(lambda: ended.append(run(command.replace("RUN", "run.toml").split())))
    assert ended == [0]
    assert re.search(r"searching layouts; (bounded|decided|improving): [\d.]+/[\d.]+ \w+", told)


def test_a_pipe_is_told_nothing() -> None:
    command = [sys.executable, "-m", "weft", *PLAN]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""


@pytest.mark.processes
def test_a_terminal_is_told_of_evaluated_batches_and_exported_parameters(
    worker_pool: WorkerPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: Callable[[Callable[[], object]], str],
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("the weft goes under and over the warp\n" * 400)
    (tmp_path / "run.toml").write_text(RUN)
    directory = trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run")
    told = here(lambda: run(["eval", str(directory), "--json"]))
    (total,) = set(re.findall(r"evaluating; held-out samples: \d+/(\d+) batches", told))
    assert int(total) == json.loads(capsys.readouterr().out)["samples"] / 8
    # A poll that sees the end only has no time to tell.
    assert f"{total}/{total} batches" in told
    assert not (directory / "progress.json").exists()
    told = here(lambda: run(["export", str(directory), str(tmp_path / "out")]))
    assert re.search(r"exporting; writing: (\S+ M)/\1 parameters read and written, 0 s left", told)


def test_half_the_work_leaves_as_much_time_as_it_has_taken(
    here: Callable[[Callable[[], object]], str],
) -> None:
    def work() -> None:
        with progressing("measuring") as report:
            begin_s = time.monotonic()
            counted = CountedWork(report, "layers [of a model]", 10, "parts")
            counted.finish(4)
            time.sleep(0.05)
            counted.finish(1)
            taken.append(time.monotonic() - begin_s)

    taken: list[float] = []
    told = here(work)
    left = re.findall(r"measuring; layers \[of a model\]: 5/10 parts, (\S+) (m?s) left", told)
    number, unit = left[-1]
    assert 0.05 <= float(number) * {"ms": 1e-3, "s": 1.0}[unit] <= 1.01 * taken[0]


def test_work_of_unknown_speed_has_no_time_left(here: Callable[[Callable[[], object]], str]) -> None:
    def work() -> None:
        with progressing("exporting") as report:
            CountedWork(report, "checking", 2_000_000, "bytes")

    told = here(work)
    assert "exporting; checking: 0 B of 2.00 MB" in told
    assert "left" not in told
