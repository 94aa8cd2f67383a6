"""Micro-batch clipping on one rank: the gradients that wait for their norm, and their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.methods.micro_batch_clipping.kinds import TAKE_GRADIENT, ClipsMicroBatches
from weft.methods.micro_batch_clipping.options import NAME, ClipTable, options_of
from weft.methods.micro_batch_clipping.report import BOUND, BOUNDS, CLIPPED, DROPPED, NORMS
from weft.methods.micro_batch_clipping.runtime.clipped_sum import ClippedSum
from weft.program.arrays import Ints
from weft.program.kinds import FORWARD
from weft.program.program import NONE
from weft.run.methods import Making, MethodState, StepGate
from weft.run.resources import Resources
from weft.run.streams import Value
from weft.run.workspace import Workspace
from weft.sync.base import Group

TAKEN = "taken_gradient"


class TakenGradient(NamedTuple):
    """The gradient of a clipped micro-batch in one stage, (n,), and the squares that its rank counts, ()."""

    gradient: torch.Tensor
    squares: torch.Tensor


class MicroBatchClipping(MethodState):
    """The clipping of a rank's stages.

    Attributes:
        stages: those that the rank trains, rising.
        last_part: the last clipped micro-batch of its replica.
    """

    def __init__(self, making: Making) -> None:
        table, owed = options_of(making.plan), making.program.obligations.methods[NAME]
        assert table is not None, "a program owes clipping to a plan that asks for it"
        assert isinstance(owed, ClipsMicroBatches)
        own = making.program.columns
        self.stages: tuple[int, ...] = tuple(np.unique(own.stage[own.kind == TAKE_GRADIENT]).tolist())
        self.last_part = int(own.part[own.kind == TAKE_GRADIENT].max(initial=0))
        # The clipped micro-batches of replicas follow each other.
        self._first = int(own.micro_batch[own.kind == FORWARD].min()) // owed.together
        self._table: ClipTable = table
        self._norms = torch.zeros(
            making.program.micro_batches // owed.together, dtype=torch.float64, device=making.device
        )
        self._gradients: list[torch.Tensor] = []
        self._sum: ClippedSum | None = None
        self._sources_in: Callable[[int], Ints] | None = None

    @property
    def sum(self) -> ClippedSum:
        assert self._sum is not None, "a state begins before it clips"
        return self._sum

    def begin(self, resources: Resources) -> None:
        self._gradients = [resources.buckets[stage].flat for stage in self.stages]
        self._sum = ClippedSum(self._table, len(self._norms), self._gradients)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {BOUND: self.sum.bounds} if self._table.micro == "quantile" else {}

    def take_sources(self, sources_in: Callable[[int], Ints]) -> None:
        if self._table.sources > 1:
            self._sources_in = sources_in

    def _sources_of(self, step: int) -> Ints:
        """Return the source of each clipped micro-batch; all its samples are of one."""
        if self._sources_in is None:
            return np.zeros(len(self._norms), dtype=np.int64)
        return self._sources_in(step).reshape(len(self._norms), -1)[:, 0]

    def add(
        self, step: int, part: int, taken: Sequence[TakenGradient], group: Group, loss_factor: float
    ) -> None:
        """Add the clipped gradients of a micro-batch, one for each of `stages`, to the sum.

        Every rank of the replica calls it.
        """
        squares = torch.stack([one.squares for one in taken]).sum()
        if group.size > 1:
            group.all_reduce(squares)
        source = int(self._sources_of(step)[self._first + part])
        norm = self.sum.add([one.gradient for one in taken], squares, loss_factor, source)
        # One rank of the replica tells the norm.
        if group.place == 0:
            self._norms[self._first + part] = norm

    def finish(self, step: int, group: Group) -> dict[str, torch.Tensor]:
        """Put the bounded sum into the gradients, and return the step's numbers; every training rank calls
        it."""
        norms, self._norms = self._norms, torch.zeros_like(self._norms)
        if group.size > 1:
            group.all_reduce(norms)
        sources = torch.from_numpy(self._sources_of(step)).to(norms.device)
        return self.sum.finish(norms, sources, self._gradients)

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        return _AllDropped(workspace)

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        known = {name: workspace.values.get((name, NONE, NONE)) for name in (BOUND, CLIPPED, DROPPED)}
        return {name: value for name, value in known.items() if value is not None}

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        names = (NORMS, BOUNDS) if self._table.sources > 1 else (NORMS,)
        return {name: one for name in names if (one := workspace.values.get((name, NONE, NONE)))}


class _AllDropped:
    """The gate of a step: it is left out if no micro-batch has a finite norm."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def reads(self) -> tuple[Value[torch.Tensor], ...]:
        return (self._workspace.values[DROPPED, NONE, NONE],)

    def votes(self, *values: Value[Any]) -> torch.Tensor:
        (dropped,) = values
        vote: torch.Tensor = (dropped.content == 1.0).float()
        return vote

    def stepped(self) -> None:
        """Do nothing: the step clears the gradient."""
