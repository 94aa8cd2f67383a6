"""`weft watch` on a terminal and as JSON, and its refusals."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from growing_runs import GrowingRun, growing
from interruptible import interruptible
from rich.text import Text

from weft.cli.main import run as weft
from weft.cli.tables.watch import curve_text

LIMIT_S = 60.0


@pytest.fixture
def grown(tmp_path: Path) -> Iterator[GrowingRun]:
    with growing(tmp_path / "runs", "first") as (run,):
        run.train(8, late_rank=3)
        run.tell("checkpoint", step=5)
        yield run


def test_a_pipe_gets_the_run_once(
    grown: GrowingRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with colours, as `less -R` shows them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert weft(["watch", str(grown.path.parent), "--terminal"]) == 0
    text = " ".join(Text.from_ansi(capsys.readouterr().out).plain.split())
    for words in (
        "first gpt-1m:",
        "broken off",
        "step 8/50 broken off, saved at 5",
        "step 7, measured:",
        "checkpoint after 5 steps",
    ):
        assert words in text
    assert "rank 3 +" in text


def test_json_is_the_state_now(grown: GrowingRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft(["watch", str(grown.path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["name"], record["state"], record["done"]) == ("first", "broken off", 0.16)
    assert record["interval"][0] == grown.job.prediction.step_s


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "missing: no such folder"),
        ([".", "--terminal"], ".: give one run directory; runs in it: none"),
        ([".", "--port", "70000"], "--port: 70000"),
        (["two", "--json"], "two: give one run directory; runs in it: a, b"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "two" / name).mkdir(parents=True)
        for file in ("run.toml", "plan.json"):
            (tmp_path / "two" / name / file).write_text("")
    assert weft(["watch", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_terminal_follows_the_run_until_ctrl_c(grown: GrowingRun) -> None:
    mine, theirs = pty.openpty()
    command = interruptible("-m", "weft", "watch", str(grown.path), "--terminal")
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "60"}
    with subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        os.close(theirs)
        assert b"8/50" in read_until(mine, b"8/50")
        grown.train(1)
        assert b"9/50" in read_until(mine, b"9/50")
        process.send_signal(signal.SIGINT)
        read_until(mine, b"\x00")
        assert process.wait(LIMIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    os.close(mine)


def read_until(terminal: int, text: bytes) -> bytes:
    """Return what is written up to a text, or until the terminal is closed."""
    found, deadline = b"", time.monotonic() + LIMIT_S
    while text not in found and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:
                break  # the command has closed it
            found += part
    return found


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([float("nan")], ""),
        ([3.0, 3.0], "▁▁"),
        ([0.0, float("nan"), 7.0], "▁█"),
        ([0.0, 2.0, 6.0, 8.0], "▁█"),
    ],
)
def test_a_curve_of_one_line(values: list[float], text: str) -> None:
    assert curve_text(values, 2) == text
