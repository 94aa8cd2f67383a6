"""Snapshots on one rank: copies to host memory, a piece for each row of the step behind a save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from weft.methods.bubble_filling.step_works import WorksInSteps
from weft.methods.snapshot.program import NAME
from weft.program.program import Instruction
from weft.run.handlers.base import WEIGHTS, Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.resources import Resources
from weft.run.streams import Completion, Ended, Stream
from weft.run.workspace import Workspace


class _Copy(NamedTuple):
    tensor: torch.Tensor
    room: torch.Tensor


class Snapshots(MethodState):
    """The copies of a rank, as `weft.run.methods.CopyBeside`."""

    def __init__(self, making: Making) -> None:
        owed = making.program.obligations.methods[NAME]
        assert isinstance(owed, WorksInSteps), "the method's pass has this obligation"
        self._pieces = owed.rows[0].pieces
        # By name of a parameter, its stage; weights that stages of the rank share are of none.
        self._stage_of: dict[str, int] = {}
        self._copies: dict[tuple[int, int], list[_Copy]] = {}
        self._ended: list[Completion] = []

    def begin(self, resources: Resources) -> None:
        names = [
            (name, stage)
            for stage, module in resources.stages.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        found = Counter(name for name, _ in names)
        self._stage_of = {name: stage for name, stage in names if found[name] == 1}

    @property
    def checkpoint_copies(self) -> Snapshots:
        return self

    def take(
        self, tensors: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        self._copies, self._ended = {}, []
        left, of_stage = dict(tensors), dict[int, list[_Copy]]()
        for name, tensor in tensors.items():
            stage = self._stage_of.get(_parameter_of(name))
            if stage is not None and tensor.is_contiguous():
                of_stage.setdefault(stage, []).append(_Copy(left.pop(name), room[name]))
        for stage, copies in of_stage.items():
            self._divide(stage, copies)
        return left

    def _divide(self, stage: int, copies: list[_Copy]) -> None:
        """Cut the tensors of a stage into pieces of nearly equal bytes; a tensor may lie in several."""
        total, before = sum(one.tensor.nbytes for one in copies), 0
        for one in copies:
            size, count = one.tensor.itemsize, one.tensor.numel()
            cuts = [
                min(max(-(-(total * piece // self._pieces - before) // size), 0), count)
                for piece in range(1, self._pieces)
            ]
            for piece, (start, end) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
                if end > start:
                    part = _Copy(*(whole.detach().view(-1)[start:end] for whole in one))
                    self._copies.setdefault((stage, piece), []).append(part)
            before += one.tensor.nbytes

    def copied(self) -> list[Completion]:
        ended, self._ended, self._copies = self._ended, [], {}
        return ended

    def issue(self, stream: Stream, workspace: Workspace, instruction: Instruction) -> Completion:
        """Issue the copies of one piece."""
        copies = self._copies.get((instruction.stage, instruction.part))
        if not copies:
            return Ended.now()

        def work() -> None:
            for one in copies:
                one.room.copy_(one.tensor, non_blocking=True)

        ended = stream.run(str(instruction), work, workspace.latest(WEIGHTS, instruction.stage))
        self._ended.append(ended)
        return ended


def _parameter_of(name: str) -> str:
    """Return the parameter of a tensor of a checkpoint: itself, or that of an optimizer's state."""
    return name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else name


def snapshot(workspace: Workspace, instruction: Instruction) -> Issue:
    """Copy one piece of the tensors that a checkpoint keeps."""
    state = workspace.resources.methods[NAME]
    assert isinstance(state, Snapshots)
    return lambda stream: state.issue(stream, workspace, instruction)


PARTS = (HandlerOf(kind="snapshot", handler=snapshot), StateOf(method=NAME, make=Snapshots))
