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


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed.

    Attributes:
        refused: the input was refused (exit code 2), otherwise the run failed (exit code 1).
        consequence: another rank's failure is the more likely cause.
        time_ns: `time.time_ns` of the failure.
        lines: one line per violation, otherwise a single line.
    """

    rank: int
    refused: bool
    consequence: bool
    time_ns: int
    lines: tuple[str, ...]


def logs_folder(run_dir: Path) -> Path:
    return Path(run_dir) / "logs"


def log_path(run_dir: Path, rank: int) -> Path:
    """What the worker of that rank printed."""
    return logs_folder(run_dir) / f"rank-{rank}.log"


def write_failure(run_dir: Path, rank: int, error: BaseException) -> Failure:
    """Leave word of the error that ends this worker."""
    refused = isinstance(error, InputError)
    if isinstance(error, InputError):
        lines = tuple(str(violation) for violation in error.violations)
    elif isinstance(error, RunError):
        lines = (_one_line(str(error)),)
    else:
        lines = (_one_line(f"{type(error).__name__}: {error}"),)
    failure = Failure(rank, refused, isinstance(error, PeerLostError), time.time_ns(), lines)
    record = {
        "refused": failure.refused,
        "consequence": failure.consequence,
        "time_ns": failure.time_ns,
        "lines": list(failure.lines),
    }
    path = _failure_path(run_dir, rank)
    path.write_text(json.dumps(record))
    return failure


def clear_failures(run_dir: Path) -> None:
    """Forget the failures of earlier attempts."""
    for path in logs_folder(run_dir).glob("rank-*.failure.json"):
        path.unlink()


def first_failure(run_dir: Path, exit_codes: Mapping[int, int]) -> Failure:
    """The failure that most likely caused the others.

    `exit_codes` maps each failed rank to its exit code, negative for a signal. A rank's own error comes
    before a death by signal, which comes before errors about lost peers; then the earliest counts.
    """
    told = [_read_failure(run_dir, rank) for rank in sorted(exit_codes)]
    silent = [rank for rank, failure in zip(sorted(exit_codes), told, strict=True) if failure is None]
    failures = [failure for failure in told if failure is not None]
    own = [failure for failure in failures if not failure.consequence]
    untold = [
        Failure(rank, False, False, 0, (f"rank {rank} {_ending(exit_codes[rank])}",)) for rank in silent
    ]
    candidates = sorted(own, key=lambda failure: failure.time_ns) or untold
    return (candidates or sorted(failures, key=lambda failure: failure.time_ns))[0]


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code} and left no error"


def _read_failure(run_dir: Path, rank: int) -> Failure | None:
    try:
        record = json.loads(_failure_path(run_dir, rank).read_text())
        lines = tuple(str(line) for line in record["lines"])
        return Failure(
            rank, bool(record["refused"]), bool(record["consequence"]), int(record["time_ns"]), lines
        )
    except (OSError, ValueError, KeyError, TypeError):
        # Killed before or while it wrote: its exit code is all there is.
        return None


def _failure_path(run_dir: Path, rank: int) -> Path:
    return logs_folder(run_dir) / f"rank-{rank}.failure.json"


def _one_line(text: str) -> str:
    return " ".join(text.split())
