"""Micro-batch clipping on one rank: its norms, and what a step tells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.methods.micro_batch_clipping.kinds import BOUND_KINDS, TAKE_GRADIENT, ClipsMicroBatches
from weft.methods.micro_batch_clipping.options import NAME, TABLE_NAME, ClipTable, options_of
from weft.methods.micro_batch_clipping.report import BOUND, BOUNDS, CLIPPED, DROPPED, NORMS
from weft.methods.micro_batch_clipping.runtime.clipped_norm import ClippedNorm
from weft.program.arrays import Ints
from weft.program.kinds import FORWARD
from weft.program.program import NONE
from weft.run.methods import Making, MethodState, PartOfSum, StepGate
from weft.run.resources import Resources
from weft.run.streams import Value
from weft.run.workspace import Workspace

TAKEN = "taken_gradient"


class MicroBatchClipping(MethodState):
    """The clipping of a rank's stages.

    Attributes:
        last_part: the last clipped micro-batch of its replica.
        norms: those of the rank: one of all its stages, or one of each.
    """

    def __init__(self, making: Making) -> None:
        table, owed = options_of(making.plan), making.program.obligations.methods[NAME]
        assert table is not None, "a program owes clipping to a plan that asks for it"
        assert isinstance(owed, ClipsMicroBatches)
        own = making.program.columns
        takes = own.kind == TAKE_GRADIENT
        stages: list[int] = np.unique(own.stage[takes]).tolist()
        self.last_part = int(own.part[takes].max(initial=0))
        self._table: ClipTable = table
        self._count = making.program.micro_batches // owed.together
        # The clipped micro-batches of replicas follow each other.
        first = int(own.micro_batch[own.kind == FORWARD].min()) // owed.together
        together = [(stage,) for stage in stages] if owed.by_stage else [tuple(stages)]
        bounds = np.flatnonzero(np.isin(own.kind, BOUND_KINDS))
        leads = [making.groups.collective[int(own.group[row])].place == 0 for row in bounds]
        of_stage = dict(zip(own.stage[bounds].tolist(), leads, strict=True))
        self.norms = [
            ClippedNorm(table, self._count, first, some, leads=of_stage[some[0]]) for some in together
        ]
        self._apart = owed.apart
        self._sources_in: Callable[[int], Ints] | None = None

    def norm_of(self, stage: int) -> ClippedNorm:
        """Return the norm to which a stage's gradients are clipped."""
        return next(one for one in self.norms if stage in one.stages)

    def begin(self, resources: Resources) -> None:
        for one in self.norms:
            one.begin([resources.buckets[stage].flat for stage in one.stages])

    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self._table.micro != "quantile":
            return {}
        names = [f"{BOUND}.{one.stages[0]}" if self._table.by_stage else BOUND for one in self.norms]
        return {name: one.sum.bounds for name, one in zip(names, self.norms, strict=True)}

    def take_sources(self, sources_in: Callable[[int], Ints]) -> None:
        if self._table.sources > 1:
            self._sources_in = sources_in

    def sources_of(self, step: int) -> Ints:
        """Return the source of each clipped micro-batch; all its samples are of one.

        Raises:
            InputError: when a step has sources of more or fewer samples.
        """
        if self._sources_in is None:
            return np.zeros(self._count, dtype=np.int64)
        sources, samples = self._sources_in(step), self._count * self._table.samples
        if sources.shape != (samples,):
            problem = f"shape {list(sources.shape)}; a step has {counted(samples, 'sample')}"
            raise InputError(Violation(f"{TABLE_NAME}: sources", problem, str([samples])))
        return sources.reshape(self._count, -1)[:, 0]

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        return _AllDropped(workspace, self.norm_of(stage).stages[0])

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        return {} if self._table.by_stage else self._told(workspace, (BOUND, CLIPPED, DROPPED))

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        names = (NORMS, BOUNDS) if self._table.sources > 1 else (NORMS,)
        return {} if self._table.by_stage else self._told(workspace, names)

    def _told(self, workspace: Workspace, names: Sequence[str]) -> Mapping[str, Value[torch.Tensor]]:
        known = {name: workspace.values.get((name, self.norms[0].stages[0], NONE)) for name in names}
        return {name: value for name, value in known.items() if value is not None}

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return the shares of the means over stages, which meet no other stage before."""
        if not self._table.by_stage:
            return {}
        leading = [one.stages[0] for one in self.norms if one.leads]
        told: dict[str, PartOfSum] = {}
        for name in (BOUND, CLIPPED, DROPPED):
            # An evaluation has none.
            known = [workspace.values.get((name, stage, NONE)) for stage in leading]
            values = tuple(value for value in known if value is not None)
            told[name] = PartOfSum(values, 1.0 / self._apart)
        return told


class _AllDropped:
    """The gate of a stage's step: it is left out if no micro-batch has a finite norm.

    `leader` is the first of the rank's stages that have the norm.
    """

    def __init__(self, workspace: Workspace, leader: int) -> None:
        self._workspace, self._leader = workspace, leader

    def reads(self) -> tuple[Value[torch.Tensor], ...]:
        return (self._workspace.values[DROPPED, self._leader, NONE],)

    def votes(self, *values: Value[Any]) -> torch.Tensor:
        (dropped,) = values
        vote: torch.Tensor = (dropped.content == 1.0).float()
        return vote

    def stepped(self) -> None:
        """Do nothing: the step clears the gradient."""
