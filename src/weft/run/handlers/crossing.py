"""What crosses between stages for one micro-batch: where a stage takes it from, and where it leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from weft.run.handlers.base import INPUT_GRADIENT, OUTPUT
from weft.run.stage.borders import Crossing
from weft.run.streams import Completion, Value
from weft.run.transport.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.workspace import Crossed, Workspace

# Where a message is left, what it is of, and which of a micro-batch's it is.
Left = tuple[Crossed, Crossing, int]


def inputs_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Where what a stage reads of other stages lies, stage by stage."""
    before = workspace.resources.borders[stage].before
    return [
        (ACTIVATION, producer, stage, message)
        for producer, crossing in before.items()
        for message in crossing.numbers(micro_batch)
    ]


def outputs_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Where what other stages read of a stage is left."""

    def key(consumer: int, message: int) -> Crossed:
        sent = (stage, consumer, message) in workspace.route.activations_sent
        return (OUTPUT if sent else ACTIVATION, stage, consumer, message)

    return _left(micro_batch, workspace.resources.borders[stage].after, key)


def gradients_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Where the gradients of a stage's outputs lie, stage by stage of those that read them."""
    after = workspace.resources.borders[stage].after
    return [
        (OUTPUT_GRADIENT, stage, consumer, message)
        for consumer, crossing in after.items()
        for message in crossing.numbers(micro_batch)
    ]


def gradients_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Where the gradients of what a stage has read are left."""

    def key(producer: int, message: int) -> Crossed:
        sent = (producer, stage, message) in workspace.route.gradients_sent
        return (INPUT_GRADIENT if sent else OUTPUT_GRADIENT, producer, stage, message)

    return _left(micro_batch, workspace.resources.borders[stage].before, key)


def _left(
    micro_batch: int, crossings: Mapping[int, Crossing], key: Callable[[int, int], Crossed]
) -> Sequence[Left]:
    return [
        (key(other, message), crossing, within)
        for other, crossing in crossings.items()
        for within, message in enumerate(crossing.numbers(micro_batch))
    ]


def fill(left: Sequence[Left], made: Iterable[Value[torch.Tensor]], values: Sequence[torch.Tensor]) -> None:
    """Fill the messages that are made of a micro-batch's outputs, or of its inputs' gradients."""
    for (_, crossing, within), value in zip(left, made, strict=True):
        value.content = crossing.packed(values, within)


def leave(
    workspace: Workspace, left: Sequence[Left], made: Iterable[Value[torch.Tensor]], ended: Completion
) -> None:
    """Leave the messages that the computation with this end fills."""
    for (key, _, _), value in zip(left, made, strict=True):
        value.completion = ended
        workspace.crossed[key] = value
