"""The windows of blocks, chosen by plans (`weft.run.stage.windows` has their attention)."""

from __future__ import annotations

from torch import nn

from weft.describe.layer_choices import Value
from weft.errors import InputError, Violation
from weft.methods.attention_window.options import NAME
from weft.run.stage.layer_choices import RunChoice
from weft.run.stage.stage_module import StageModule
from weft.run.stage.windows import give_window


def choose_window(stage: nn.Module, layer: int, value: Value) -> None:
    """Set the attention window of one block of a stage to `value` tokens.

    Raises:
        InputError: if the stage's model is of no known family.
    """
    if not isinstance(stage, StageModule):
        raise InputError(Violation(NAME, f"layer {layer} is no block of a family that weft knows"))
    give_window(stage.block(layer), int(value))


PARTS = (RunChoice(name=NAME, apply=choose_window),)
