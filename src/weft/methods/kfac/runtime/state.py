"""`Kfac`: the curvature of a rank's stages, from step to step and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weft.methods.bubble_filling.kinds import FillsBubbles
from weft.methods.bubble_filling.options import NAME as BUBBLES
from weft.methods.kfac.kinds import Preconditions
from weft.methods.kfac.options import NAME, options_of
from weft.methods.kfac.runtime.stage_curvature import StageCurvature
from weft.program.kinds import FORWARD
from weft.run.methods import Making, MethodState
from weft.run.resources import Resources
from weft.run.stage.stage_module import StageModule
from weft.run.stage.taps import Tap


class Kfac(MethodState):
    """K-FAC on one rank.

    Attributes:
        stages: the curvature of each stage with blocks.
        damping: of the job.
    """

    def __init__(self, making: Making) -> None:
        options, owed = options_of(making.plan), making.program.obligations.methods
        assert options is not None, "a program owes K-FAC to a plan that asks for it"
        mine, windows = owed[NAME], owed[BUBBLES]
        assert isinstance(mine, Preconditions)
        assert isinstance(windows, FillsBubbles)
        self.damping = options.damping
        self.stages: dict[int, StageCurvature] = {}
        self._owed, self._windows, self._program = mine, windows, making.program

    def begin(self, resources: Resources) -> None:
        for stage, module in resources.stages.items():
            positions, steps = self._owed.blocks[stage], self._windows.steps[stage]
            if not positions:
                continue
            assert isinstance(module, StageModule), "blocks of known families are in such stages"
            self.stages[stage] = StageCurvature(
                module,
                resources.buckets[stage],
                positions,
                self._program.micro_batches,
                self._pieces(stage),
                steps,
            )

    def _pieces(self, stage: int) -> int:
        """Return the micro-batches of a step that run through the stage on this rank."""
        columns = self._program.columns
        own = (columns.kind == FORWARD) & (columns.stage == stage)
        return int(np.unique(columns.micro_batch[own]).size)

    def taps(self, stage: int) -> Sequence[Tap]:
        return (self.stages[stage].tap,) if stage in self.stages else ()

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        return {
            f"{stage}/{position}/{name}": tensor
            for stage, one in self.stages.items()
            for position, block in one.blocks.items()
            for name, tensor in block.tensors.items()
        }
