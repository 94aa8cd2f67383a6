"""What a logger is, and what it is told when it opens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# One step or one look at held-out samples: "step" and figures by name.
Record = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a logger is told of its run.

    `first_step`: the step at which this start goes on; what an earlier start logged from there on is redone.
    `steps` and `held_out` are the records of earlier starts that stay, in the order of their steps.
    `config`: the run file with every default, and the plan in short.
    """

    run_dir: Path
    first_step: int
    steps: tuple[Record, ...]
    held_out: tuple[Record, ...]
    config: Mapping[str, Any]


class Logger(Protocol):
    """Takes records; everything is called on one thread that is not the one that trains.

    Whatever it raises ends the logger and not the run.
    """

    def log(self, record: Record) -> None:
        """Take one record. Steps rise; what is held out has the number of steps trained before it."""
        ...

    def flush(self) -> None:
        """No further record waits: let readers see what there is."""
        ...

    def finish(self) -> None:
        """The run is over; nothing follows."""
        ...


def is_held_out(record: Record) -> bool:
    return "held_out_loss" in record
