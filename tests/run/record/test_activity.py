"""Activity: who computes is at work, who sleeps or is stopped is quiet."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from weft.run.record.activity import Activity

# A thread that computes for a tenth of a second is at work.
LIMIT_S = 10.0
# Looks around now and then, as a rank does that waits for others.
WAITS = "import time; print(flush=True)\nwhile True: time.sleep(0.05)"
# Computes beside its main thread, which sleeps.
COMPUTES = (
    "import hashlib, threading; print(flush=True)\n"
    "def work():\n while True: hashlib.sha256(bytes(1 << 20))\n"
    "threading.Thread(target=work).start()"
)

LOOK_AROUND = (
    "import threading, time; print(flush=True)\n"
    "def work():\n while True: time.sleep(0.001)\n"
    "for _ in range(20): threading.Thread(target=work).start()"
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


def used_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def quiet_s(activity: Activity, *processes: subprocess.Popen[bytes]) -> float:
    """After a look, a second after the one before."""
    activity.look([process.pid for process in processes], 1.0)
    return activity.quiet_s


def test_who_waits_or_is_stopped_is_quiet(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    waiting, stopped = start(WAITS), start(COMPUTES)
    stop(stopped)
    activity = Activity(LIMIT_S)
    assert [quiet_s(activity, waiting, stopped) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_one_that_computes_keeps_all_from_being_quiet(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    waiting, computing = start(WAITS), start(COMPUTES)
    activity = Activity(LIMIT_S)
    assert quiet_s(activity, waiting, computing) == 1
    for _ in range(3):
        before_s = used_s(computing)
        while used_s(computing) < before_s + 0.2:
            time.sleep(0.01)
        assert quiet_s(activity, waiting, computing) == 0
    stop(computing)
    quiet_s(activity, waiting, computing)
    assert quiet_s(activity, waiting, computing) >= 1


def test_many_threads_that_look_around_are_quiet(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    """As gloo's do, a few of each process group."""
    process = start(LOOK_AROUND)
    activity = Activity(LIMIT_S)
    quiet_s(activity, process)
    before_s = used_s(process)
    while used_s(process) < before_s + 0.2:
        time.sleep(0.01)
    assert quiet_s(activity, process) == 2


def test_one_that_has_ended_is_quiet() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    activity = Activity(LIMIT_S)
    for _ in range(3):
        activity.look([process.pid], 1.0)
    assert activity.quiet_s == 3
