"""The application of a plan's choices to the layers of a stage; methods contribute the choices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

from weft.bundles import runtime_parts
from weft.describe.layer_choices import Value
from weft.describe.plan import LayerChoice


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """A method's way to run one layer of a stage, by its position in the model, with a chosen value.

    `apply` raises InputError if the stage cannot.
    """

    name: str
    apply: Callable[[nn.Module, int, Value], None]


def apply_choices(choices: Iterable[LayerChoice], stage: nn.Module, layers: Collection[int]) -> None:
    """Apply the choices for these layers of the model to the stage that has them.

    Raises:
        InputError: when it has a layer that cannot run with its choice.
    """
    known = {one.name: one for one in runtime_parts(RunChoice)}
    for choice in choices:
        for layer in sorted({*choice.layers} & {*layers}):
            known[choice.name].apply(stage, layer, choice.value)
