"""`plan.loss`: the kernel of the head and its cross entropy, as a choice for the model's last layer.

A plan of the kernel "whole", which makes all logits first, has no choice for the layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol, TypedDict

from weft.describe.plan import LayerChoice

Loss = Literal["whole", "chunked", "fused"]
# "auto": the planner chooses among the losses that run on any device.
AskedLoss = Literal["whole", "chunked", "fused", "auto"]
WHOLE: Loss = "whole"
ANY_LOSS: AskedLoss = "auto"
# The names of the choices for the last layer.
CHUNKED, FUSED = "chunked-loss", "fused-loss"
_NAMES: dict[Loss, str] = {"chunked": CHUNKED, "fused": FUSED}
# The value of a choice whose chunks follow from the sizes of the head.
BY_SIZE = "by size"


class _Decided(Protocol):
    @property
    def loss(self) -> Loss: ...
    @property
    def loss_chunk_tokens(self) -> int | None: ...


class LossKeys(TypedDict):
    """The decisions of a layout about its loss."""

    loss: Loss
    loss_chunk_tokens: int | None


def loss_choices(decided: _Decided, last: int) -> tuple[LayerChoice, ...]:
    """Return the choice for the last layer, by position, of a layout's loss; none for "whole"."""
    if decided.loss == WHOLE:
        return ()
    value = BY_SIZE if decided.loss_chunk_tokens is None else decided.loss_chunk_tokens
    return (LayerChoice(name=_NAMES[decided.loss], layers=(last,), value=value),)


def other_choices(choices: Iterable[LayerChoice]) -> tuple[LayerChoice, ...]:
    """Return the choices for layers that are not of the loss."""
    return tuple(one for one in choices if one.name not in _NAMES.values())


def loss_of(choices: Iterable[LayerChoice]) -> LossKeys:
    """Return the loss of a plan with these choices, as a layout has it."""
    for word, name in _NAMES.items():
        for one in choices:
            if one.name == name:
                return {
                    "loss": word,
                    "loss_chunk_tokens": None if one.value == BY_SIZE else int(one.value),
                }
    return {"loss": WHOLE, "loss_chunk_tokens": None}
