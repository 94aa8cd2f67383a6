"""`GradientBucket`: all gradients of a stage in one flat tensor.

The parameters' `.grad` are views into it. So backward accumulates in place, a reduction moves one tensor, and
clearing is one operation. Where replicas shard gradients, several stages take turns in one buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

import torch
from torch import nn

from weft.run.streams import THERE
from weft.sync.base import ParameterPlace

# Kernels step the last elements of a tensor, which fill no vector, with other roundings than the rest. So
# parameters and shards begin at multiples of the widest vector: a piece is stepped as the whole would be.
VECTOR_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of a stage's trained parameters in a flat tensor.

    A parameter that is used twice (tied weights) lies there once. If there are shards, zeros pad every
    parameter to a multiple of `VECTOR_ELEMENTS`.

    Attributes:
        parameters: in the order of the module.
        starts: the place of each parameter's first element.
        length: the tensor's length. Zeros follow the last parameter, so that shards are equal.
        shards: the number of equal shards.
    """

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    length: int
    shards: int

    @classmethod
    def of(
        cls, module: nn.Module, shards: int = 1, apart: Iterable[nn.Parameter] = (), *, parts: int = 1
    ) -> FlatLayout:
        """Return the layout of a module's trained parameters without those in `apart`.

        Every shard can be cut into `parts` equal parts.
        """
        elsewhere = {id(parameter) for parameter in apart}
        parameters = tuple(
            parameter
            for parameter in module.parameters()
            if parameter.requires_grad and id(parameter) not in elsewhere
        )
        vector = VECTOR_ELEMENTS if shards > 1 else 1
        sizes = (_multiple(parameter.numel(), vector) for parameter in parameters)
        *starts, end = accumulate(sizes, initial=0)
        return cls(parameters, tuple(starts), _multiple(end, shards * lcm(parts, vector)), shards)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a flat tensor of shape (length,) in the shapes of the parameters."""
        return [
            flat[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def share(self, place: int) -> slice:
        """Return the range of the `place`-th shard."""
        length = self.length // self.shards
        return slice(place * length, (place + 1) * length)

    def within(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return the pieces from `first` to `last`: (parameter's index, first element, one past its last)."""
        found = []
        for index, (parameter, begins) in enumerate(zip(self.parameters, self.starts, strict=True)):
            start, end = max(first - begins, 0), min(last - begins, parameter.numel())
            if start < end:
                found.append((index, start, end))
        return found

    def zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros on the parameters' device."""
        device = self.parameters[0].device if self.parameters else None
        return torch.zeros(length, dtype=dtype, device=device)

    def flatten(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the parameters, shape (length,), padded with zeros."""
        flat = self.zeros(self.length, dtype)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            view.copy_(parameter.detach())
        return flat


class GradientBucket:
    """Flat gradients of one stage, in a buffer that it may share with other stages.

    Do not set `.grad` to None: use `clear`. Work that makes gradients waits for `buffer.emptied` and claims
    the bucket. Work that takes them out hands it back, and its issuer sets `buffer.emptied`.
    """

    def __init__(self, layout: FlatLayout, buffer: GradientBuffer) -> None:
        self.flat = buffer.flat[: layout.length]
        self.layout = layout
        self.buffer = buffer

    @property
    def shards(self) -> int:
        """The number of equal shards of the gradient."""
        return self.layout.shards

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The stage's parameters in the order of the module."""
        return self.layout.parameters

    @property
    def places(self) -> list[ParameterPlace]:
        """The places of the stage's parameters in `flat`, in the order of the module."""
        pairs = zip(self.layout.starts, self.layout.parameters, strict=True)
        return [ParameterPlace(start, tuple(parameter.shape)) for start, parameter in pairs]

    @property
    def holds(self) -> bool:
        """True if the buffer has this stage's gradients."""
        return self.buffer.holder is self

    def clear(self) -> None:
        self.flat.zero_()

    def claim(self) -> None:
        """Take the buffer before the stage's gradients are made; clear it unless this stage has it
        already."""
        buffer = self.buffer
        if buffer.holder is self:
            return
        assert buffer.holder is None, "a reduction empties the buffer before another stage takes it"
        buffer.holder = self
        self.clear()
        for parameter, view in zip(self.layout.parameters, self.layout.views(self.flat), strict=True):
            parameter.grad = view

    def hand_back(self) -> None:
        """Release the buffer for the next stage."""
        assert self.buffer.holder is self, "a stage hands back the buffer that it holds"
        for parameter in self.layout.parameters:
            parameter.grad = None
        self.buffer.holder = None


class GradientBuffer:
    """A buffer for the gradients of one stage at a time, as large as the largest of its stages needs.

    Attributes:
        emptied: ends with the last work that took gradients out.
    """

    def __init__(self, layouts: list[FlatLayout], dtype: torch.dtype) -> None:
        self.flat = layouts[0].zeros(max(layout.length for layout in layouts), dtype)
        self.holder: GradientBucket | None = None
        self.emptied = THERE


def make_buckets(
    layouts: Mapping[int, FlatLayout], buffers: int, dtype: torch.dtype
) -> dict[int, GradientBucket]:
    """Return the gradient buckets of a rank's stages; the j-th stage uses buffer j mod `buffers`.

    A stage that shares its buffer with no other has it from the start.
    """
    stages = sorted(layouts)
    buckets: dict[int, GradientBucket] = {}
    for first in range(min(buffers, len(stages))):
        turns = stages[first::buffers]
        buffer = GradientBuffer([layouts[stage] for stage in turns], dtype)
        buckets |= {stage: GradientBucket(layouts[stage], buffer) for stage in turns}
        if len(turns) == 1:
            buckets[turns[0]].claim()
    return buckets


def _multiple(count: int, of: int) -> int:
    """Return the least multiple that is not below `count`."""
    return -(-count // of) * of
