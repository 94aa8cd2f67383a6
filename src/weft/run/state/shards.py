"""`StageShard`: the equal share of a stage that belongs to one of its replicas (ZeRO levels 1 to 3).

The weights of a stage are one flat tensor and its gradients another. Replica r of n owns the r-th of n equal
ranges of both (Rajbhandari et al., arXiv 1910.02054). The borders fall anywhere, also inside a parameter. On
levels 1 and 2 all weights of the stage stay (`ResidentWeights`). On level 3 the Program gathers them into a
buffer (`GatheredWeights`), in which the stages of a rank take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import give
from weft.run.streams import THERE, Value
from weft.sync.base import Gatherer, Group, Meeting

# Keeps a payload of a gather: (the step that computes with the gathered weights, the stage, the payload).
KeepPayload = Callable[[int, int, torch.Tensor], None]


class StageWeights(Protocol):
    """The flat weights under a stage's parameters, and this rank's own range of them.

    Attributes:
        own: the range.
        room: ends with the last work that freed the buffer of all weights; work that gathers them reads it.
    """

    own: torch.Tensor
    room: Value[None]

    def outdate(self, step: int) -> None:
        """Note that this step will change the own ranges of all."""
        ...

    def gather(self, group: Group) -> None:
        """Take the room and bring the weights up to date from the shares of all."""
        ...

    def require(self) -> None:
        """Assert that the weights are there; readers of the weights call it."""
        ...

    def free(self) -> None:
        """Release the room for another stage; the issuer of this work sets `room`."""
        ...

    def show(self, group: Group) -> None:
        """Bring the parameters up to date until the next step."""
        ...


class ResidentWeights:
    """All weights of a stage all the time. Between a step and the next gather only the own range is new.

    Args:
        layout: the stage's layout.
        flat: its weights, shape (length,), in their final precision.
        own: this rank's range of them.
    """

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, own: slice) -> None:
        self._flat = flat
        self.own = flat[own]
        self.room = THERE
        _make_of(layout, flat)

    def outdate(self, step: int) -> None:
        """Do nothing: every gather sends the whole range."""

    def gather(self, group: Group) -> None:
        # Copy the share: the gather overwrites the whole tensor while it reads the share.
        group.all_gather(self._flat, self.own.clone())

    def require(self) -> None:
        """Do nothing: the weights are always there."""

    def free(self) -> None:
        """Do nothing: no other stage can use the room."""

    def show(self, group: Group) -> None:
        self.gather(group)


class ReplicaWeights:
    """All weights of a stage, the same on all ranks, beside which a rank keeps its own range.

    A synchroniser gathers: it brings all weights near the own ranges, once for every step. So evaluations
    read what the next step computes with.

    Args:
        layout, flat, own: as for `ResidentWeights`; `own` becomes a tensor apart.
        meeting: of the gathers, whatever their step.

    Attributes:
        layout: the stage's layout.
        shown: the own range of all weights.
        keep: takes each payload that this rank sends: its step, its stage, the payload; None keeps none.
        steps: the number of the step that computes with all weights, and with the own ranges, on the host.
    """

    def __init__(
        self, layout: FlatLayout, flat: torch.Tensor, own: slice, gatherer: Gatherer, meeting: Meeting
    ) -> None:
        self._flat = flat
        self._gatherer = gatherer
        self._meeting = meeting
        self.layout = layout
        self.keep: KeepPayload | None = None
        self._source: torch.Tensor | None = None
        self.own = flat[own].clone()
        self.shown = flat[own]
        self.steps = torch.zeros(2, dtype=torch.int64)
        self.room = THERE
        _make_of(layout, flat)

    def outdate(self, step: int) -> None:
        self.steps[1] = step + 1

    def gather(self, group: Group) -> None:
        if self._source is not None:
            group.all_gather(self._flat, self._source.clone())
            self._source = None
        shown, stepped = self.steps.tolist()
        if shown != stepped:
            sent = self._gatherer.gather(self._flat, self.own, replace(self._meeting, step=stepped))
            self.steps[0] = stepped
            if self.keep is not None:
                self.keep(stepped, self._meeting.stage, sent)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's place among the ranks that share the stage, and their number."""
        return self._meeting.group.place, self._meeting.group.size

    def require(self) -> None:
        """Do nothing: the weights are always there."""

    def free(self) -> None:
        """Do nothing: no other stage can use the room."""

    def show(self, group: Group) -> None:
        self.gather(group)

    def resume(self) -> None:
        """Take all weights from what a checkpoint has put in `shown` of every rank."""
        self._source = self.shown

    def rebase(self) -> None:
        """Take all weights from the own ranges as they are."""
        self._source = self.own
        self.steps[0] = self.steps[1]


class WeightBuffer:
    """A buffer for the weights of one stage at a time, as large as the largest of its stages needs."""

    def __init__(self, layouts: Sequence[FlatLayout], dtype: torch.dtype) -> None:
        self.flat = layouts[0].zeros(max(layout.length for layout in layouts), dtype)
        self.holder: GatheredWeights | None = None
        self.freed = THERE


class GatheredWeights:
    """A rank's own range of a stage's weights. From a gather to its free, a buffer has all of them.

    Autograd keeps the parameters, which are views of the buffer, from a forward pass to its backward pass.
    Meanwhile other weights may lie there: the Program gathers them again before the backward pass.

    Args:
        layout, flat, own: as for `ResidentWeights`; `flat` is not kept.
        buffer: shared with the rank's other stages of the same parity.
    """

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, own: slice, buffer: WeightBuffer) -> None:
        self.own = flat[own].clone()
        self._layout = layout
        self._buffer = buffer
        self._room = buffer.flat[: layout.length]
        self._shown: torch.Tensor | None = None
        _make_of(layout, self._room)

    @property
    def room(self) -> Value[None]:
        return self._buffer.freed

    @room.setter
    def room(self, freed: Value[None]) -> None:
        self._buffer.freed = freed

    def outdate(self, step: int) -> None:
        """Do nothing: every gather sends the whole range."""

    def claim(self) -> None:
        """Take the room and ignore its content."""
        assert self._buffer.holder is None, "a stage frees the buffer before another one gathers into it"
        self._buffer.holder = self
        if self._shown is not None:
            self._shown = None
            _make_of(self._layout, self._room)

    def gather(self, group: Group) -> None:
        self.claim()
        group.all_gather(self._room, self.own)

    def require(self) -> None:
        assert self._buffer.holder is self, "weights are read between a gather and its free"

    def free(self) -> None:
        self.require()
        self._buffer.holder = None

    def show(self, group: Group) -> None:
        # Use new memory: the buffer cannot hold all stages at once.
        self._shown = torch.empty_like(self._room)
        group.all_gather(self._shown, self.own)
        _make_of(self._layout, self._shown)


class StageShard:
    """One rank's share of one stage.

    Args:
        weights: the stage's weights.
        gradient: the own range of the reduced gradient.
        group: the ranks that share the stage.
    """

    def __init__(self, weights: StageWeights, gradient: torch.Tensor, group: Group) -> None:
        self.weights = weights
        self.own_gradient = gradient
        self._group = group

    def gather(self) -> None:
        """Bring the weights up to date; every rank of the group calls it."""
        self.weights.gather(self._group)

    def show(self) -> None:
        """Bring the parameters up to date until the next step; every rank of the group calls it."""
        self.weights.show(self._group)

    def take_in(self, share: torch.Tensor, part: int) -> None:
        """Add the `part`-th reduced share of a step, shape (length / shards,), to the own gradient."""
        if part == 0:
            self.own_gradient.copy_(share)
        else:
            self.own_gradient.add_(share)


def gather_weights(shards: Mapping[int, StageShard]) -> None:
    """Bring the parameters of a rank's stages up to date; all ranks of the job call it, between two steps."""
    for stage in sorted(shards):
        shards[stage].show()


def _make_of(layout: FlatLayout, flat: torch.Tensor) -> None:
    """Make the parameters of a stage views of `flat`."""
    for parameter, view in zip(layout.parameters, layout.views(flat), strict=True):
        give(parameter, view)
