"""Plans in the words of other stacks, by the name that `weft plan --emit` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.doors.emit import (
    accelerate,
    deepspeed,
    kubernetes,
    megatron,
    skypilot,
    slurm,
    torchtitan,
    torchtitan_toml,
)
from weft.doors.emit.base import Emitted
from weft.errors import require_choice
from weft.planning.planned import PlannedJob

EMITTERS: Mapping[str, Callable[[PlannedJob], Emitted]] = MappingProxyType(
    {
        door.NAME: door.emit
        for door in (
            megatron,
            torchtitan,
            torchtitan_toml,
            deepspeed,
            accelerate,
            slurm,
            skypilot,
            kubernetes,
        )
    }
)
# Stacks that start weft's own runtime, which must be able to execute the plan.
OWN_RUNS = frozenset({slurm.NAME, skypilot.NAME, kubernetes.NAME})


def emit(planned: PlannedJob, name: str) -> Emitted:
    """Return the plan in the words of a stack.

    Raises:
        InputError: when there is no such stack, or it cannot express the plan at all.
    """
    require_choice("--emit", name, EMITTERS)
    return EMITTERS[name](planned)
