"""How the replicas of a stage average its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from weft.methods.local_averaging.options import NAME
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import WEIGHTS, Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.resources import Resources, groups_of_stages, share_of
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Group, SynchroniserOf
from weft.sync.collectives import add_up
from weft.sync.dense import Dense
from weft.training.tensor_shares import parameter_of


class StageWeights:
    """What a rank steps of one stage, which counts as its replica's share of the batch in an average."""

    def __init__(self, stepped: tuple[torch.Tensor, ...], share: float, group: Group) -> None:
        self.stepped = stepped
        self._share = share
        self._group = group

    def mean(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The mean of all replicas' tensors, of one type, as new ones; every rank of the group calls it."""
        sizes = [tensor.numel() for tensor in tensors]
        length = -(-sum(sizes) // self._group.size) * self._group.size
        flat = tensors[0].new_zeros(length)
        parts = flat[: sum(sizes)].split(sizes)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))
        flat.mul_(self._share)
        add_up(flat, self._group)
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


class LocalAveraging(MethodState):
    """The averaging of one rank's stages."""

    def __init__(self, making: Making) -> None:
        self._program = making.program
        self._stages: dict[int, StageWeights] = {}

    def begin(self, resources: Resources) -> None:
        program, rank = self._program, resources.rank
        self._modules = resources.stages
        self._publish = {stage: one.publish for stage, one in resources.stepped.items()}
        for stage, group in groups_of_stages(program, rank, "average_weights").items():
            stepped = resources.stepped.get(stage)
            weights = (
                tuple(one for one in resources.stages[stage].parameters() if one.requires_grad)
                if stepped is None
                else tuple(piece.stepped for piece in stepped.pieces)
            )
            self._stages[stage] = StageWeights(
                weights, share_of(program, rank, stage), resources.groups.collective[group]
            )

    @contextmanager
    def settled(self) -> Iterator[None]:
        own = {stage: [one.detach().clone() for one in held.stepped] for stage, held in self._stages.items()}
        for stage in sorted(self._stages):
            self._give(stage, self._stages[stage].mean(self._stages[stage].stepped))
        try:
            yield
        finally:
            for stage, weights in own.items():
                self._give(stage, weights)

    def agreed(self, own: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Means of weights and of what optimizers keep of them; replicas count their steps alike."""
        found = dict(own)
        for stage in sorted(self._stages):
            mine = {name for name, _ in self._modules[stage].named_parameters()}
            names: dict[torch.dtype, list[str]] = {}
            for name in sorted(own):
                if parameter_of(name) in mine and own[name].ndim and own[name].is_floating_point():
                    names.setdefault(own[name].dtype, []).append(name)
            for some in names.values():
                means = self._stages[stage].mean(tuple(own[name] for name in some))
                found |= dict(zip(some, means, strict=True))
        return found

    def average(self, stage: int) -> None:
        """Give a stage's weights the mean of its replicas'."""
        one = self._stages[stage]
        self._give(stage, one.mean(one.stepped))

    def _give(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        for mine, value in zip(self._stages[stage].stepped, weights, strict=True):
            mine.detach().copy_(value)
        if stage in self._publish:
            self._publish[stage]()


def average_weights(workspace: Workspace, instruction: Instruction) -> Issue:
    """Average a stage's weights with all its replicas, once it has stepped."""
    stage, label = instruction.stage, str(instruction)
    state = workspace.resources.methods[NAME]
    assert isinstance(state, LocalAveraging)

    def work() -> None:
        state.average(stage)

    def issue(stream: Stream) -> Completion:
        averaged = stream.run(label, work, workspace.latest(WEIGHTS, stage))
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, averaged)
        return averaged

    return issue


PARTS = (
    SynchroniserOf(name=NAME, make=lambda options: Dense()),
    HandlerOf(kind="average_weights", handler=average_weights),
    StateOf(method=NAME, make=LocalAveraging),
)
