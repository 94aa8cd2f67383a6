"""How layers run with what a plan chooses for them; methods contribute it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

from weft.bundles import runtime_parts
from weft.describe.layer_choices import Value
from weft.describe.plan import LayerChoice


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """Lets a layer of a stage, by its position in the model, run with a value of one choice.

    `apply` raises InputError where the stage cannot.
    """

    name: str
    apply: Callable[[nn.Module, int, Value], None]


def apply_choices(choices: Iterable[LayerChoice], stage: nn.Module, layers: Collection[int]) -> None:
    """Let a stage, which has these layers of the model, run with what is chosen for them.

    Raises:
        InputError: when it has a layer that cannot.
    """
    known = {one.name: one for one in runtime_parts(RunChoice)}
    for choice in choices:
        for layer in sorted({*choice.layers} & {*layers}):
            known[choice.name].apply(stage, layer, choice.value)
