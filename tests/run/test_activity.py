"""Activity: who computes is at work, who sleeps or is stopped is quiet."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from weft.run.activity import Activity

# Much longer than the looks of these tests take.
LIMIT_S = 1000.0
# Looks around now and then, as a rank does that waits for others.
WAITS = "import time; print(flush=True)\nwhile True: time.sleep(0.05)"
# Computes beside its main thread, which sleeps.
COMPUTES = (
    "import hashlib, threading; print(flush=True)\n"
    "def work():\n while True: hashlib.sha256(bytes(1 << 20))\n"
    "threading.Thread(target=work).start()"
)

pytestmark = pytest.mark.processes


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts processes that have begun, and kills them in the end."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def quiet_after(activity: Activity, processes: list[subprocess.Popen[bytes]], looks: int) -> float:
    """The longest quiet time that was seen."""
    quiet_s = []
    for _ in range(looks):
        activity.look([process.pid for process in processes], 1.0)
        quiet_s.append(activity.quiet_s)
        time.sleep(0.02)
    return max(quiet_s)


def test_who_waits_or_is_stopped_is_quiet(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    waiting, stopped = start(WAITS), start(COMPUTES)
    stopped.send_signal(signal.SIGSTOP)
    while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    # Now and then the one that waits is seen while it looks around.
    assert quiet_after(Activity(LIMIT_S), [waiting, stopped], 50) >= 5


def test_one_that_computes_keeps_all_from_being_quiet(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    processes = [start(WAITS), start(COMPUTES)]
    assert quiet_after(Activity(LIMIT_S), processes, 50) <= 1


def test_processor_time_counts_though_a_thread_is_never_seen_to_run(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    # Between two looks it computes, and is stopped while one looks.
    process = start(COMPUTES)
    activity = Activity(limit_s=1.0)
    for _ in range(5):
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        activity.look([process.pid], 1.0)
        used_s = sum(psutil.Process(process.pid).cpu_times()[:2])
        process.send_signal(signal.SIGCONT)
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < used_s + 0.1:
            time.sleep(0.01)
    assert activity.quiet_s == 0


def test_one_that_has_ended_is_quiet() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    activity = Activity(LIMIT_S)
    for _ in range(3):
        activity.look([process.pid], 1.0)
    assert activity.quiet_s == 3
