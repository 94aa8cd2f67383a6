"""Plans in the words of other stacks, by the name that `weft plan --emit` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from weft.describe.model import ModelConfig
from weft.doors.emit import (
    accelerate,
    deepspeed,
    device_map,
    kubernetes,
    megatron,
    skypilot,
    slurm,
    torchtitan,
    torchtitan_keys,
    torchtitan_toml,
)
from weft.doors.emit.base import Emitted, require_family
from weft.errors import require_choice
from weft.planning.planned_job import PlannedJob

EMITTERS: Mapping[str, Callable[[PlannedJob], Emitted]] = MappingProxyType(
    {
        door.NAME: door.emit
        for door in (
            megatron,
            torchtitan,
            torchtitan_toml,
            deepspeed,
            accelerate,
            device_map,
            slurm,
            skypilot,
            kubernetes,
        )
    }
)
# Stacks that start weft's own runtime, which must be able to execute the plan.
OWN_RUNS = frozenset({slurm.NAME, skypilot.NAME, kubernetes.NAME})
# Files that are no configuration of a layout, which `weft explain` could read.
NO_LAYOUTS = OWN_RUNS | {device_map.NAME}


# Stacks with models of few families, by the name that messages give them.
_FAMILIES: Mapping[str, tuple[str, Sequence[str]]] = MappingProxyType(
    {
        megatron.NAME: (megatron.STACK, megatron.FAMILIES),
        **dict.fromkeys(
            (torchtitan.NAME, torchtitan_toml.NAME), (torchtitan_keys.STACK, torchtitan_keys.FAMILIES)
        ),
    }
)


def require_stack(name: str, model: ModelConfig) -> None:
    """Refuse an unknown stack, and a model that a stack does not have; a search can follow.

    Raises:
        InputError: with the nearest stack.
    """
    require_choice("--emit", name, EMITTERS)
    if name in _FAMILIES:
        require_family(model, *_FAMILIES[name])


def emit(planned: PlannedJob, name: str) -> Emitted:
    """Return the plan in the words of a stack.

    Raises:
        InputError: when there is no such stack, or it cannot express the plan at all.
    """
    require_stack(name, planned.problem.model)
    return EMITTERS[name](planned)
