"""The values that cross between stages for one micro-batch: the keys where stages take and leave them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from weft.program.program import NONE
from weft.run.handlers.base import INPUT_GRADIENT, OUTPUT
from weft.run.stage.borders import Crossing
from weft.run.streams import Completion, Value
from weft.run.transport.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.workspace import Crossed, Sent, Workspace


class Left(NamedTuple):
    """A message that a stage leaves: its number among the micro-batch's messages, and a key per receiver.

    A receiver on this rank has one key. Of ranks that gather a value, some have none.
    """

    keys: tuple[Crossed, ...]
    crossing: Crossing
    within: int


def inputs_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Return the keys of the values that a stage reads of other stages, stage by stage."""
    before = workspace.resources.borders[stage].before
    return [
        (ACTIVATION, producer, stage, message, NONE)
        for producer, crossing in before.items()
        for message in crossing.numbers(micro_batch)
    ]


def outputs_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Return the keys at which a stage leaves its outputs for other stages."""
    sent = workspace.route.activations_sent
    return [
        _left(OUTPUT, ACTIVATION, (stage, consumer, message), sent, crossing, within)
        for consumer, crossing in workspace.resources.borders[stage].after.items()
        for within, message in enumerate(crossing.numbers(micro_batch))
    ]


def gradients_taken(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Crossed]:
    """Return the keys of the gradients of a stage's outputs, by each stage that reads them."""
    after = workspace.resources.borders[stage].after
    return [
        (OUTPUT_GRADIENT, stage, consumer, message, NONE)
        for consumer, crossing in after.items()
        for message in crossing.numbers(micro_batch)
    ]


def gradients_left(workspace: Workspace, stage: int, micro_batch: int) -> Sequence[Left]:
    """Return the keys at which a stage leaves the gradients of its inputs."""
    sent = workspace.route.gradients_sent
    return [
        _left(INPUT_GRADIENT, OUTPUT_GRADIENT, (producer, stage, message), sent, crossing, within)
        for producer, crossing in workspace.resources.borders[stage].before.items()
        for within, message in enumerate(crossing.numbers(micro_batch))
    ]


def _left(
    away: str, here: str, message: tuple[int, int, int], sent: Sent, crossing: Crossing, within: int
) -> Left:
    peers = sent.get(message, ())
    if not peers and crossing.reshaped is None:
        return Left(((here, *message, NONE),), crossing, within)
    return Left(tuple((away, *message, peer) for peer in peers), crossing, within)


def messages_of(left: Sequence[Left]) -> list[Value[torch.Tensor]]:
    """Return an empty value for each key."""
    return [Value() for one in left for _ in one.keys]


def fill(left: Sequence[Left], made: Iterable[Value[torch.Tensor]], values: Sequence[torch.Tensor]) -> None:
    """Fill the messages made of a micro-batch's outputs, or of its inputs' gradients."""
    empty = iter(made)
    for _, crossing, within in left:
        packed = crossing.packed(values, within)
        if crossing.reshaped is None:
            next(empty).content = packed
        else:
            for content in crossing.reshaped.of(packed):
                next(empty).content = content


def leave(
    workspace: Workspace, left: Sequence[Left], made: Iterable[Value[torch.Tensor]], ended: Completion
) -> None:
    """Leave the messages that the computation with this end fills."""
    keys = (key for one in left for key in one.keys)
    for key, value in zip(keys, made, strict=True):
        value.completion = ended
        workspace.crossed[key] = value
