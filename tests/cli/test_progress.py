"""What a terminal is told while a command works: the search, its time and its best plan so far."""

import os
import pty
import subprocess
import sys

PLAN = ("plan", "gpt2", "--on", "8xa100-80gb")


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """Return what a command writes to standard output, and to a terminal as standard error."""
    mine, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "weft.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        told = b""
        try:
            while part := os.read(mine, 1 << 16):
                told += part
        except OSError:
            pass  # the command has closed the terminal
        assert process.stdout is not None
        written = process.stdout.read()
    os.close(mine)
    assert process.returncode == 0
    return written.decode(), told.decode()


def test_a_terminal_is_told_of_the_search_and_its_best_plan() -> None:
    written, told = on_a_terminal(*PLAN)
    assert "searching layouts" in told
    assert "best so far" in told
    assert "searching" not in written
    assert "best     " in written


def test_a_pipe_is_told_nothing() -> None:
    command = [sys.executable, "-m", "weft.cli.main", *PLAN]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
