"""How layers run with what a plan chooses for them; methods contribute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from weft.bundles import runtime_parts
from weft.describe.layer_choices import Value
from weft.describe.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """Lets a layer of a stage, by its position in the model, run with a value of one choice.

    `apply` raises InputError where the stage cannot.
    """

    name: str
    apply: Callable[[nn.Module, int, Value], None]


def apply_choices(plan: Plan, stages: Mapping[int, nn.Module]) -> None:
    """Let the layers of a rank's stages run with what the plan chooses for them.

    Raises:
        InputError: when a stage has a layer that cannot.
    """
    known = {one.name: one for one in runtime_parts(RunChoice)}
    for choice in plan.layer_choices:
        for index, module in stages.items():
            for layer in sorted({*choice.layers} & {*plan.stages[index].layers}):
                known[choice.name].apply(module, layer, choice.value)
