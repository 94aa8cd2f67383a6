"""`Kfac`: the curvature of a rank's stages, from step to step and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from weft.methods.bubble_filling.kinds import FillsBubbles
from weft.methods.bubble_filling.options import NAME as BUBBLES
from weft.methods.kfac.kinds import Preconditions
from weft.methods.kfac.linears import read_treated
from weft.methods.kfac.options import NAME, options_of
from weft.methods.kfac.report import AGE
from weft.methods.kfac.runtime.stage_curvature import LayerCurvature, StageCurvature
from weft.program.kinds import FORWARD
from weft.run.methods import Making, MethodState, PartOfSum
from weft.run.resources import Resources
from weft.run.stage.taps import Tap
from weft.run.workspace import Workspace


class Kfac(MethodState):
    """K-FAC on one rank.

    Attributes:
        stages: the curvature of each stage with treated layers.
    """

    def __init__(self, making: Making) -> None:
        plan = making.plan
        options, owed = options_of(plan), making.program.obligations.methods
        assert options is not None, "a program owes K-FAC to a plan that asks for it"
        mine, windows = owed[NAME], owed[BUBBLES]
        assert isinstance(mine, Preconditions)
        assert isinstance(windows, FillsBubbles)
        self._options, self._treated = options, read_treated(options.linears)
        self.stages: dict[int, StageCurvature] = {}
        self._owed, self._windows, self._program = mine, windows, making.program
        self._samples, self._tokens = plan.micro_batch_size, plan.micro_batch_size * plan.sequence
        # Each of them tells its age; ranks of a replica have the same.
        self._holders = sum(len(one.ranks) for one in plan.stages[0].replicas)
        self._dtype = torch.float32
        # By stage, what a checkpoint may fill before the first step.
        self._rooms: dict[int, dict[str, torch.Tensor]] = {}

    def begin(self, resources: Resources) -> None:
        for stage, module in resources.stages.items():
            layers, steps = self._owed.layers[stage], self._windows.steps[stage]
            if not layers:
                continue
            self.stages[stage] = StageCurvature(
                module,
                resources.buckets[stage],
                {layer: self._treated[layer] for layer in layers},
                self._program.micro_batches,
                len(self._micro_batches(stage)),
                steps,
                self._samples,
                self._tokens,
                self._options,
            )
        self._dtype = resources.dtype

    def _micro_batches(self, stage: int) -> list[int]:
        """Return the micro-batches of a step that run through the stage on this rank."""
        columns = self._program.columns
        own = (columns.kind == FORWARD) & (columns.stage == stage)
        found: list[int] = np.unique(columns.micro_batch[own]).tolist()
        return found

    def taps(self, stage: int) -> Sequence[Tap]:
        return (self.stages[stage].tap,) if stage in self.stages else ()

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        if not workspace.training:
            return {}
        ages = tuple(workspace.latest(AGE, stage) for stage in self.stages)
        layers = sum(map(len, self._owed.layers)) * self._holders
        return {AGE: PartOfSum(ages, 1.0 / layers)}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._by_name(lambda one: one.used_tensors)

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        own = self._by_name(lambda one: one.own_tensors)
        for stage, one in self.stages.items():
            left = one.left
            if one.is_fresh:
                left = self._rooms[stage] = one.rooms(self._micro_batches(stage), self._dtype)
            own |= {f"left/{stage}/{name}": tensor for name, tensor in left.items()}
        return own

    def _by_name(
        self, tensors_of: Callable[[LayerCurvature], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        return {
            f"{position}.{name}": tensor
            for stage in self.stages.values()
            for position, one in stage.layers.items()
            for name, tensor in tensors_of(one).items()
        }

    def resume(self) -> None:
        for stage, rooms in self._rooms.items():
            self.stages[stage].take(rooms)
        self._rooms.clear()

    def rebase(self) -> None:
        self._rooms.clear()
        for stage in self.stages.values():
            for one in stage.layers.values():
                one.forget()
