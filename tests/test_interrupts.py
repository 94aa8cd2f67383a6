"""Ctrl-C ends a command in one line with code 130, and a closed pipe ends it in silence, wherever it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from interruptible import interruptible

# Python's own start is over; SIGINT comes when a function of a module is called for the first time.
AT_STAGE = """
import os, signal, sys

module, function = sys.argv.pop(1).split(":")


def interrupt(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name == function and frame.f_globals.get("__name__") == module:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)


from weft.__main__ import start

sys.setprofile(interrupt)
start()
"""
IN_A_DESTRUCTOR = """
import os, signal, time

from weft.interrupts import end_on_interrupt, interruptible


class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


end_on_interrupt()
try:
    with interruptible():
        Interrupting()
        time.sleep(60)
except KeyboardInterrupt:
    print("cleaned up")
"""


@pytest.mark.parametrize(
    "stage",
    [
        "weft.cli.main:<module>",
        "cyclopts.core:<module>",
        "weft.cli.plans:<module>",
        "numpy:<module>",
        "weft.planning.planned:plan_run",
        "rich.console:print",
        "threading:_shutdown",
    ],
)
def test_an_interrupt_ends_a_command_in_one_line(stage: str) -> None:
    words = interruptible("-c", AT_STAGE, stage, "plan", "gpt-1m", "--on", "1xa100-80gb")
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "weft: interrupted\n")


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    words = interruptible("-c", IN_A_DESTRUCTOR)
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "cleaned up\n", "")


def test_a_program_started_with_interrupts_ignored_goes_on_ignoring_them() -> None:
    code = "import signal; from weft.interrupts import end_on_interrupt, interruptible; end_on_interrupt()\n"
    code += "with interruptible(): signal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)"
    ignoring = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"
    subprocess.run([sys.executable, "-c", ignoring], check=True)


@pytest.mark.parametrize(
    "words", [["schema", "run"], ["plan", "--help-all"], ["schedule", "gpipe"], ["doctor"]]
)
def test_a_closed_pipe_ends_a_command_in_silence(words: list[str]) -> None:
    command = [sys.executable, "-m", "weft", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (0, b"")
