"""A task for tests of runs that lose processes: it lets its own process be killed at a chosen place.

$DEATHS names the places as "RANK LIFE PLACE CALL", separated by commas: in that life of the rank, counted
from 0, at that call of the place, counted from 1. Places are `PLACES`, and `read`, the read of training
samples. From step $JOIN_AT on, the last step of a round waits for new processes of all absent ranks. None
joins before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.methods.cser.runtime.meeting import Assembly
from weft.methods.cser.runtime.replicas import CserReplicas
from weft.training import loop
from weft.training.checkpoint import checkpoints, saver
from weft.training.coordination.membership import Membership
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.text import CausalLanguageModelling

# By name, the owner of a function, the function, and whether the process dies before the call.
PLACES: dict[str, tuple[Any, str, bool]] = {
    "meeting": (Assembly, "mean", True),
    "met": (Assembly, "mean", False),
    "rejoin": (CserReplicas, "take_in", True),
    "rejoined": (CserReplicas, "take_in", False),
    "kept": (Membership, "keep", False),
    "enter": (Membership, "enter", True),
    "entered": (Membership, "enter", False),
    "collect": (saver, "collect", True),
    "write": (saver, "write", True),
    "plan-to-write": (checkpoints, "plan_to_write", False),
    "finish": (loop, "_finish", True),
}


def _life() -> int:
    """How many processes have had this rank before; a file counts them."""
    path = Path(os.environ["LIVES"]) / os.environ["RANK"]
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(path.read_text().splitlines()) - 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(function: Callable[..., Any], call: int, before: bool) -> Callable[..., Any]:
    left = call

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and before:
            _die()
        result = function(*arguments, **named)
        if left == 0:
            _die()
        return result

    return called


def _wait_for_others() -> None:
    first = int(os.environ["JOIN_AT"])

    def waited(membership: Membership) -> bool:
        absent = membership.job.plan.ranks - len(membership.roll.members)
        if not absent or membership.context.rank or membership.reached < first:
            return False
        while sum(map(len, membership._call.waiting(membership._replicas))) < absent:
            time.sleep(0.01)
        return True

    Membership.others_wait = waited  # type: ignore[method-assign]


class Dies(CausalLanguageModelling):
    """Language modelling in a process that may die."""

    # It acts by rank, so every rank reads.
    mapped = True

    _reads: int | None = None
    _begun = False

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        if Dies._begun:
            return
        Dies._begun = True
        _wait_for_others()
        life = _life()
        for death in filter(None, os.environ.get("DEATHS", "").split(",")):
            rank, of_life, place, call = death.split()
            if (rank, int(of_life)) != (os.environ["RANK"], life):
                continue
            if place == "read":
                Dies._reads = int(call)
            else:
                owner, name, before = PLACES[place]
                setattr(owner, name, _dying(getattr(owner, name), int(call), before))

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out and Dies._reads is not None:
            Dies._reads -= 1
            if Dies._reads == 0:
                _die()
        return super().batch(samples, held_out=held_out)
