"""`Failure`: the error of a worker, sent through a pipe because a disk may be full. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, RunError


class PeerLostError(RunError):
    """A transfer failed because the other end is gone: usually a consequence of another rank's failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank.

    Attributes:
        refused: the input was refused (exit code 2), otherwise the run failed (exit code 1).
        consequence: another rank's failure is the more likely cause.
        silent: the rank left no report; only its exit code is known.
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
    """Return the path of the log with the printed output of the rank's worker."""
    return logs_folder(run_dir) / f"rank-{rank}.log"


def leave_word(pipe: int, rank: int, error: BaseException) -> None:
    """Write the error that ends this worker, for the agent at the other end of the pipe."""
    record = {
        "refused": isinstance(error, InputError),
        "consequence": isinstance(error, PeerLostError),
        "time_ns": time.time_ns(),
        "lines": _lines(rank, error),
    }
    # The reader may be gone.
    with suppress(OSError), os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(record).encode())


def disk_problem(rank: int, error: OSError) -> str:
    """Return one line about a file that could not be read or written."""
    return _one_line(f"rank {rank}: {error.filename or 'a file'}: {error.strerror or error}")


def first_failure(words: Mapping[int, bytes], exit_codes: Mapping[int, int]) -> Failure:
    """Return the failure that most likely caused the others.

    `words` maps ranks to their written reports. `exit_codes` maps failed ranks, in the order of their ends,
    to exit codes, negative for a signal. A rank's own error ranks first, then a silent end. A lost peer comes
    last, as does a silent SIGTERM, with which the agent ends the remaining ranks. Among equals the earliest
    counts.
    """

    def order(failure: Failure) -> tuple[bool, bool, int]:
        ended_by_agent = failure.silent and exit_codes[failure.rank] == -signal.SIGTERM
        return (failure.consequence or ended_by_agent, failure.silent, failure.time_ns)

    found = (_failure_of(rank, words.get(rank, b""), code) for rank, code in exit_codes.items())
    return min(found, key=order)


def _failure_of(rank: int, word: bytes, exit_code: int) -> Failure:
    try:
        record = json.loads(word)
        return Failure(
            rank=rank,
            refused=bool(record["refused"]),
            consequence=bool(record["consequence"]),
            silent=False,
            time_ns=int(record["time_ns"]),
            lines=tuple(str(line) for line in record["lines"]),
        )
    except (ValueError, KeyError, TypeError):
        # The rank was killed before or while it wrote; only its exit code is known.
        line = f"rank {rank} {_ending(exit_code)}"
        return Failure(rank=rank, refused=False, consequence=False, silent=True, time_ns=0, lines=(line,))


def _lines(rank: int, error: BaseException) -> list[str]:
    if isinstance(error, InputError):
        return [str(violation) for violation in error.violations]
    if isinstance(error, RunError):
        return [_one_line(str(error))]
    if isinstance(error, OSError):
        return [disk_problem(rank, error)]
    return [_one_line(f"{type(error).__name__}: {error}")]


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code} and left no error"


def _one_line(text: str) -> str:
    return " ".join(text.split())
