"""The cost of a live page: processor time of its server, bytes to its viewers, and steps beside it.

    python benchmarks/watching.py

A run of gpt-1m trains on two ranks. Phases without and with viewers follow each other while it goes on. A
viewer is a connection that reads all news of the run, as a browser does, without drawing. Steps are compared
by their median, with those of the phases without a viewer before and after.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from figures import Value
from harness import Report, parser

from weft.training.directory.live_run import LiveRun

VIEWERS = (1, 8)
ROUNDS = 3
# Shares of one core, and steps with viewers over steps without.
TARGET_SHARE, TARGET_RATIO = 0.05, 1.02
RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 128
[train]
global_batch = 16
steps = 1000000
[cluster]
use = "this-machine"
[plan]
pp = 2
dp = 1
schedule = "1f1b"
[checkpoint]
every = 1000000
"""


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=20.0, help="the length of a phase")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("watching", asked)
    report.print_machine()
    for viewers in VIEWERS:
        name = f"{viewers} viewers" if viewers > 1 else "1 viewer"
        if report.missing(name):
            report.add_cell(name, figures(viewers, asked.seconds))


def figures(viewers: int, phase_s: float) -> dict[str, Value]:
    with tempfile.TemporaryDirectory() as folder:
        file, directory = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(RUN)
        train = [sys.executable, "-m", "weft", "train", str(file), "--directory", str(directory)]
        with subprocess.Popen(train, stdout=subprocess.DEVNULL) as training:
            try:
                return beside(directory, viewers, phase_s)
            finally:
                training.terminate()


def beside(directory: Path, viewers: int, phase_s: float) -> dict[str, Value]:
    """Return the figures of phases with viewers, each between two phases without."""
    run = LiveRun(directory)
    while len(run.steps) < 20:
        time.sleep(0.5)
        run.look()
    server = subprocess.Popen(
        [sys.executable, "-m", "weft", "watch", str(directory), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    address, _, token = server.stdout.readline().strip().removeprefix("watch: http://").partition("/?token=")
    process = psutil.Process(server.pid)
    shares, rates, ratios = [], [], []
    medians = [steps_in_phase(run, phase_s)]
    try:
        for _ in range(ROUNDS):
            readers = [Reader(address, token, directory.name) for _ in range(viewers)]
            time.sleep(2.0)  # the first news of a viewer are all of the run
            before_s, read = sum(process.cpu_times()[:2]), sum(one.bytes for one in readers)
            watched_s = steps_in_phase(run, phase_s)
            shares.append((sum(process.cpu_times()[:2]) - before_s) / phase_s)
            rates.append((sum(one.bytes for one in readers) - read) / phase_s / viewers)
            for one in readers:
                one.close()
            medians.append(steps_in_phase(run, phase_s))
            ratios.append(watched_s / statistics.mean(medians[-2:]))
    finally:
        server.terminate()
        server.wait()
    return {
        "processor, of a core": Value(statistics.median(shares), "share", TARGET_SHARE),
        "to each viewer per second": Value(statistics.median(rates), "bytes"),
        "step over a step without viewers": Value(statistics.median(ratios), "ratio", TARGET_RATIO),
    }


def steps_in_phase(run: LiveRun, phase_s: float) -> float:
    """Return the median step of the next so many seconds."""
    run.look()
    lines = run.lines
    time.sleep(phase_s)
    run.look()
    return statistics.median(one.step_s for one in run.steps_after(lines))


class Reader:
    """A viewer: a thread that reads the news of a run until it is closed."""

    def __init__(self, address: str, token: str, name: str) -> None:
        self.bytes = 0
        self._connection = http.client.HTTPConnection(address)
        headers = {"Authorization": f"Bearer {token}"}
        self._connection.request("GET", f"/news/{name}", headers=headers)
        self._answer = self._connection.getresponse()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while line := self._answer.readline():
                self.bytes += len(line)
        except (OSError, ValueError, AttributeError):
            pass  # closed

    def close(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)
        self._thread.join()
        self._connection.close()


if __name__ == "__main__":
    main()
