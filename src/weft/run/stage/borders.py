"""Borders of stages: the values that cross between a stage and its neighbours, and their shapes.

A stage has inputs and outputs in a fixed order. For one micro-batch, one message crosses an edge of the stage
graph. The micro-batch is the smaller one of the edge's two stages. The message has the values that the
consumer's layers read, each once. Gradients come back the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.run.parallel.tensor_stage import tensor_ranks
from weft.run.stage.reshaped import Reshaped
from weft.run.stage.wiring import Wired
from weft.run.state.precision import PRECISIONS


@dataclass(frozen=True, slots=True)
class Crossing:
    """The values that cross one edge.

    Attributes:
        places: those of the crossing inputs or outputs among the stage's inputs or outputs.
        shapes: the shape of each value in one message, as this rank receives it.
        dtype: the type of all messages.
        messages: the number of messages for one of the stage's own micro-batches.
        reshaped: the form of the single value for another stage with another number of tensor ranks.
    """

    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    messages: int = 1
    reshaped: Reshaped | None = None

    def numbers(self, micro_batch: int) -> range:
        """Return the numbers of the messages of one of the stage's own micro-batches."""
        return range(micro_batch * self.messages, (micro_batch + 1) * self.messages)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a message: that of its single value, or (all elements of its values,)."""
        return self.shapes[0] if len(self.shapes) == 1 else (sum(map(prod, self.shapes)),)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of a message to the other stage."""
        return self.shape if self.reshaped is None else self.reshaped.shape(self.shape)

    def packed(self, values: Sequence[torch.Tensor], message: int) -> torch.Tensor:
        """Return the `message`-th message, made from all inputs or outputs of a micro-batch.

        Raises:
            TypeError: when it is not the message that the other stage expects, which would read as many bytes
                and take those of the next message.
        """
        parts = [values[place] for place in self.places]
        if self.messages > 1:
            parts = [
                part[message * shape[0] : (message + 1) * shape[0]]
                for part, shape in zip(parts, self.shapes, strict=True)
            ]
        made = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        if made.shape != self.shape or made.dtype != self.dtype:
            expected = f"the other stage expects {list(self.shape)} of {self.dtype}"
            raise TypeError(f"the message is {list(made.shape)} of {made.dtype}; {expected}")
        return made

    def unpacked(self, messages: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values of a micro-batch, in the order of `places`."""
        if len(self.shapes) == self.messages == 1:
            return messages
        if len(self.shapes) > 1:
            sizes = [prod(shape) for shape in self.shapes]
            cut = [one.split(sizes) for one in messages]
        else:
            cut = [(one,) for one in messages]
        joined = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*cut, strict=True)]
        return [
            one.reshape(-1, *shape[1:]) if len(self.shapes) > 1 else one
            for one, shape in zip(joined, self.shapes, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Borders:
    """The borders of one stage.

    Attributes:
        splits: the number of the stage's own micro-batches per micro-batch of the batch.
        samples: numbers of the inputs of a sample that it reads; they are the first of its inputs.
        inputs, outputs: the numbers of values that it reads and gives.
        before, after: the crossings, by the stage that gives or reads the values.
    """

    splits: int
    samples: tuple[int, ...]
    inputs: int
    outputs: int
    before: Mapping[int, Crossing]
    after: Mapping[int, Crossing]


def received(crossings: Collection[Crossing], messages: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return values by their place, from all messages of a micro-batch, crossing by crossing.

    A gradient that several stages send is added up.
    """
    left, found = iter(messages), dict[int, torch.Tensor]()
    for crossing in crossings:
        values = crossing.unpacked(list(islice(left, crossing.messages)))
        for place, value in zip(crossing.places, values, strict=True):
            found[place] = found[place] + value if place in found else value
    return found


def borders_of(
    plan: Plan, stage: int, replica: int, module: nn.Module, before: Sequence[int], after: Sequence[int]
) -> Borders:
    """Return the borders of a replica of a stage with the neighbours `before` and `after`."""
    faces = (
        _wired(plan, module, before, after)
        if isinstance(module, Wired)
        else _plain(plan, module, before, after)
    )
    size = plan.size_of(stage)
    dtype = PRECISIONS[plan.precision]
    form_for = partial(Reshaped.between, plan, stage, replica=replica, tensor=tensor_ranks(module))

    def crossing(other: int, places: tuple[int, ...], shape: _Shape) -> Crossing:
        samples = min(size, plan.size_of(other))
        shapes, reshaped = tuple(shape(place, samples) for place in places), form_for(other)
        return Crossing(places, shapes, dtype, size // samples, reshaped)

    return Borders(
        splits=plan.micro_batch_size // size,
        samples=faces.samples,
        inputs=faces.inputs,
        outputs=faces.outputs,
        before={other: crossing(other, places, faces.input_shape) for other, places in faces.before.items()},
        after={other: crossing(other, places, faces.output_shape) for other, places in faces.after.items()},
    )


# From a place among inputs or outputs, and a number of samples, to the value's shape.
_Shape = Callable[[int, int], tuple[int, ...]]


class _Faces(NamedTuple):
    """A module's own account of its inputs and outputs."""

    samples: tuple[int, ...]
    inputs: int
    outputs: int
    before: Mapping[int, tuple[int, ...]]
    after: Mapping[int, tuple[int, ...]]
    input_shape: _Shape
    output_shape: _Shape


def _wired(plan: Plan, module: Wired, before: Sequence[int], after: Sequence[int]) -> _Faces:
    samples, takes, gives = tuple(module.inputs), tuple(module.takes), tuple(module.gives)
    first = len(samples)
    read = [module.readers(layer) for layer in gives]
    return _Faces(
        samples=samples,
        inputs=first + len(takes),
        outputs=len(gives),
        before={
            other: tuple(i for i, layer in enumerate(takes, first) if layer in plan.stages[other].layers)
            for other in before
        },
        after={
            other: tuple(i for i, by in enumerate(read) if not by.isdisjoint(plan.stages[other].layers))
            for other in after
        },
        input_shape=lambda place, samples: module.value_shape(takes[place - first], samples),
        output_shape=lambda place, samples: module.value_shape(gives[place], samples),
    )


def _plain(plan: Plan, module: Any, before: Sequence[int], after: Sequence[int]) -> _Faces:
    """Return the faces of a module with one input and one output."""
    return _Faces(
        samples=() if before else (0,),
        inputs=1,
        outputs=1,
        before=dict.fromkeys(before, (0,)),
        after=dict.fromkeys(after, (0,)),
        input_shape=lambda _, samples: module.input_shape(samples, plan.sequence),
        output_shape=lambda _, samples: module.output_shape(samples, plan.sequence),
    )


def require_plain(stages: Mapping[int, nn.Module], program_edges: Sequence[tuple[int, int]]) -> None:
    """Refuse modules of one input and one output that have several neighbours on a side.

    Raises:
        InputError: names these stages.
    """
    for side, name in ((1, "inputs"), (0, "outputs")):
        ends = Counter(edge[side] for edge in program_edges)
        problems = [
            Violation(f"stage {stage}", f"has {ends[stage]} {name}, and its module takes and gives one value")
            for stage, module in stages.items()
            if ends[stage] > 1 and not isinstance(module, Wired)
        ]
        if problems:
            raise InputError(problems)
