"""What went wrong in a worker, in a file that the agent reads after the worker is gone. No torch here."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, RunError


class PeerLostError(RunError):
    """A transfer failed because the other end is gone: usually a consequence of another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        refused: the input was refused (exit code 2), otherwise the run failed (exit code 1).
        consequence: another rank's failure is the more likely cause.
        silent: the rank left no word; its exit code is all there is.
        time_ns: `time.time_ns` of the failure.
        lines: one line per violation, otherwise a single line.
    """

    rank: int
    refused: bool
    consequence: bool
    silent: bool
    time_ns: int
    lines: tuple[str, ...]


def logs_folder(run_dir: Path) -> Path:
    return Path(run_dir) / "logs"


def log_path(run_dir: Path, rank: int) -> Path:
    """What the worker of that rank printed."""
    return logs_folder(run_dir) / f"rank-{rank}.log"


def write_failure(run_dir: Path, rank: int, error: BaseException) -> None:
    """Leave word of the error that ends this worker."""
    refused = isinstance(error, InputError)
    if isinstance(error, InputError):
        lines = tuple(str(violation) for violation in error.violations)
    elif isinstance(error, RunError):
        lines = (_one_line(str(error)),)
    else:
        lines = (_one_line(f"{type(error).__name__}: {error}"),)
    record = {
        "refused": refused,
        "consequence": isinstance(error, PeerLostError),
        "time_ns": time.time_ns(),
        "lines": list(lines),
    }
    _failure_path(run_dir, rank).write_text(json.dumps(record))


def clear_failures(run_dir: Path) -> None:
    """Forget the failures of earlier attempts."""
    for path in logs_folder(run_dir).glob("rank-*.failure.json"):
        path.unlink()


def first_failure(run_dir: Path, exit_codes: Mapping[int, int]) -> Failure:
    """The failure that most likely caused the others.

    `exit_codes` maps each failed rank, in the order in which they ended, to its exit code, negative for a
    signal. A rank's own error comes before a silent end, which comes before a lost peer and before SIGTERM,
    with which the agent ends the ranks that are left; then the earliest counts.
    """

    def order(failure: Failure) -> tuple[bool, bool, int]:
        ended_by_agent = failure.silent and exit_codes[failure.rank] == -signal.SIGTERM
        return (failure.consequence or ended_by_agent, failure.silent, failure.time_ns)

    return min((_failure_of(run_dir, rank, code) for rank, code in exit_codes.items()), key=order)


def _failure_of(run_dir: Path, rank: int, exit_code: int) -> Failure:
    try:
        record = json.loads(_failure_path(run_dir, rank).read_text())
        return Failure(
            rank=rank,
            refused=bool(record["refused"]),
            consequence=bool(record["consequence"]),
            silent=False,
            time_ns=int(record["time_ns"]),
            lines=tuple(str(line) for line in record["lines"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        # Killed before or while it wrote: its exit code is all there is.
        line = f"rank {rank} {_ending(exit_code)}"
        return Failure(rank=rank, refused=False, consequence=False, silent=True, time_ns=0, lines=(line,))


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code} and left no error"


def _failure_path(run_dir: Path, rank: int) -> Path:
    return logs_folder(run_dir) / f"rank-{rank}.failure.json"


def _one_line(text: str) -> str:
    return " ".join(text.split())
