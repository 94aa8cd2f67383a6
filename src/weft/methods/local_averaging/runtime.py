"""The averaging of a stage's weights over its replicas, and the means that stand for differing replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from weft.methods.local_averaging.options import NAME, LocalAveragingOptions
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import WEIGHTS, Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.resources import Resources, groups_of_stages, share_of
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.averaging import Averaging, OuterMomentum
from weft.sync.base import Averager, Group, Meeting, StatefulSynchroniser, SynchroniserOf

Tensors = Sequence[torch.Tensor]


class AveragedStage:
    """The tensors that a rank steps of one stage.

    Args:
        stepped: the tensors, in the same order on all replicas.
        share: this replica's share of the batch.
        group: the group of all replicas.
    """

    def __init__(self, stepped: Tensors, share: float, group: Group) -> None:
        self.stepped = stepped
        self.share = share
        self.group = group

    def flat(self, tensors: Tensors) -> torch.Tensor:
        """Return a flat copy of tensors of one type, padded with zeros so that replicas shard it equally."""
        length = sum(tensor.numel() for tensor in tensors)
        flat = tensors[0].new_zeros(-(-length // self.group.size) * self.group.size)
        for part, tensor in zip(_parts(flat, tensors), tensors, strict=True):
            part.copy_(tensor.detach())
        return flat

    def mean(self, tensors: Tensors) -> Tensors:
        """Return the replicas' mean of tensors of one type, in new tensors; every rank of the group calls."""
        flat = self.flat(tensors)
        Averaging().average(flat, self.share, Meeting(group=self.group))
        return _parts(flat, tensors)


def _parts(flat: torch.Tensor, like: Tensors) -> Tensors:
    """Return the beginning of a flat tensor as views in the shapes of `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class LocalAveraging(MethodState):
    """The state of averaging on one rank."""

    def __init__(self, making: Making) -> None:
        self._program = making.program
        self._stages: dict[int, AveragedStage] = {}

    def begin(self, resources: Resources) -> None:
        program = self._program
        assert isinstance(resources.synchroniser, Averager), "the method brings its own"
        self._modules, self._synchroniser = resources.stages, resources.synchroniser
        self._publish = {stage: one.publish for stage, one in resources.stepped.items()}
        for stage, group in sorted(groups_of_stages(program, "average_weights").items()):
            stepped = resources.stepped.get(stage)
            weights = (
                [one for one in resources.stages[stage].parameters() if one.requires_grad]
                if stepped is None
                else [piece.stepped for piece in stepped.pieces]
            )
            share, over = share_of(program, stage), resources.groups.collective[group]
            self._stages[stage] = AveragedStage(weights, share, over)
        self.rebase()

    def rebase(self) -> None:
        if isinstance(self._synchroniser, StatefulSynchroniser):
            for stage, one in self._stages.items():
                self._synchroniser.begin(stage, one.flat(one.stepped))

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        synchroniser = self._synchroniser
        return synchroniser.tensors() if isinstance(synchroniser, StatefulSynchroniser) else {}

    @contextmanager
    def settled(self) -> Iterator[None]:
        own = {stage: [one.detach().clone() for one in held.stepped] for stage, held in self._stages.items()}
        for stage, one in self._stages.items():
            self._give(stage, one.mean(one.stepped))
        try:
            yield
        finally:
            for stage, weights in own.items():
                self._give(stage, weights)

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        """Return the means of weights and of their optimizer states; replicas have equal counts of steps."""
        found = dict(own)
        for stage, held in self._stages.items():
            mine = {name for name, _ in self._modules[stage].named_parameters()}
            names: dict[torch.dtype, list[str]] = {}
            for name in sorted(own):
                if parameters[name] in mine and own[name].ndim and own[name].is_floating_point():
                    names.setdefault(own[name].dtype, []).append(name)
            for some in names.values():
                found |= dict(zip(some, held.mean([own[name] for name in some]), strict=True))
        return found

    def average(self, stage: int, step: int) -> None:
        """Average a stage's weights over its replicas."""
        one = self._stages[stage]
        flat = one.flat(one.stepped)
        self._synchroniser.average(flat, one.share, Meeting(group=one.group, stage=stage, step=step))
        self._give(stage, _parts(flat, one.stepped))

    def _give(self, stage: int, weights: Tensors) -> None:
        for mine, value in zip(self._stages[stage].stepped, weights, strict=True):
            mine.detach().copy_(value)
        if stage in self._publish:
            self._publish[stage]()


def average_weights(workspace: Workspace, instruction: Instruction) -> Issue:
    """Average a stage's weights over all its replicas, after its step."""
    stage, label = instruction.stage, str(instruction)
    state = workspace.resources.methods[NAME]
    assert isinstance(state, LocalAveraging)

    def issue(stream: Stream) -> Completion:
        step = workspace.step

        def work() -> None:
            state.average(stage, step)

        averaged = stream.run(label, work, workspace.latest(WEIGHTS, stage))
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, averaged)
        return averaged

    return issue


def _synchroniser(options: LocalAveragingOptions) -> Averaging:
    if not options.steps_outside:
        return Averaging()
    return OuterMomentum(options.outer_momentum, options.outer_learning_rate)


PARTS = (
    HandlerOf(kind="average_weights", handler=average_weights),
    StateOf(method=NAME, make=LocalAveraging),
    SynchroniserOf(name=NAME, make=_synchroniser),
)
