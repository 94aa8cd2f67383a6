"""The interface of a logger, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# One step or one look at held-out samples: "step" and figures by name.
Record = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The description of a run for its loggers.

    `first_step`: the step at which this start begins or resumes; it redoes an earlier start's later records.
    `steps` and `held_out`: the records of earlier starts that stay, in the order of their steps.
    `config`: the run file with every default, and a summary of the plan.
    """

    run_dir: Path
    first_step: int
    steps: tuple[Record, ...]
    held_out: tuple[Record, ...]
    config: Mapping[str, Any]


class Logger(Protocol):
    """A receiver of records; all calls are on one thread, not on the training thread.

    Any error ends the logger and not the run.
    """

    def log(self, record: Record) -> None:
        """Take one record; steps rise. The step of a held-out record is the number of trained steps."""
        ...

    def flush(self) -> None:
        """Show all records to readers; called when no further record waits."""
        ...

    def finish(self) -> None:
        """Close the logger at the end of the run; it is the last call."""
        ...


def is_held_out(record: Record) -> bool:
    """Return True if a record is one of held-out samples."""
    return "held_out_loss" in record
