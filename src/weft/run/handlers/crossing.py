"""The values that cross between stages for one micro-batch: the keys where stages take and leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from weft.run.handlers.base import INPUT_GRADIENT, OUTPUT
from weft.run.stage.borders import Crossing
from weft.run.streams import Completion, Value
from weft.run.transport.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.workspace import Crossed, Workspace

# A message's key, its crossing, and its number among the micro-batch's messages.
Left = tuple[Crossed, Crossing, int]


def inputs_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Return the keys of the values that a stage reads of other stages, stage by stage."""
    before = workspace.resources.borders[stage].before
    return [
        (ACTIVATION, producer, stage, message)
        for producer, crossing in before.items()
        for message in crossing.numbers(micro_batch)
    ]


def outputs_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Return the keys at which a stage leaves its outputs for other stages."""

    def key(consumer: int, message: int) -> Crossed:
        sent = (stage, consumer, message) in workspace.route.activations_sent
        return (OUTPUT if sent else ACTIVATION, stage, consumer, message)

    return _left(micro_batch, workspace.resources.borders[stage].after, key)


def gradients_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Return the keys of the gradients of a stage's outputs, by each stage that reads them."""
    after = workspace.resources.borders[stage].after
    return [
        (OUTPUT_GRADIENT, stage, consumer, message)
        for consumer, crossing in after.items()
        for message in crossing.numbers(micro_batch)
    ]


def gradients_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Return the keys at which a stage leaves the gradients of its inputs."""

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
    """Fill the messages made of a micro-batch's outputs, or of its inputs' gradients."""
    for (_, crossing, within), value in zip(left, made, strict=True):
        value.content = crossing.packed(values, within)


def leave(
    workspace: Workspace, left: Sequence[Left], made: Iterable[Value[torch.Tensor]], ended: Completion
) -> None:
    """Leave the messages that the computation with this end fills."""
    for (key, _, _), value in zip(left, made, strict=True):
        value.completion = ended
        workspace.crossed[key] = value
