"""What the runtime asks of a stage that tensor ranks divide, and does with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import InputError, Violation
from weft.program.buffers import MAKES_GRADIENTS
from weft.program.kinds import REDUCE, STEP
from weft.program.program import Program
from weft.run.bucket import FlatLayout
from weft.run.divided_logits import DividedLogits
from weft.run.tensor_layers import Division
from weft.run.tensor_parallel import TensorRanks, summed


@runtime_checkable
class TensorParallel(Protocol):
    """A stage of which this rank may have a share; `divisions` say how by parameter, others are whole."""

    tensor: TensorRanks
    divisions: Mapping[str, Division]

    def summed_parameters(self) -> tuple[nn.Parameter, ...]:
        """Whole parameters of which each rank makes a part of the gradient."""
        ...

    def divided_logits(self, output: torch.Tensor) -> DividedLogits | None:
        """The last stage's output as a share of the logits, or None where it is whole."""
        ...


def tensor_ranks(module: nn.Module) -> TensorRanks:
    """The ranks that divide a stage; one where it does not say so."""
    return module.tensor if isinstance(module, TensorParallel) else TensorRanks()


def own_share(module: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What a stage holds of a whole parameter, or of a state of its shape, by the parameter's name."""
    if isinstance(module, TensorParallel) and name in module.divisions:
        return module.divisions[name].own(whole, module.tensor)
    return whole


def connect_stages(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
) -> None:
    """Let the stages of a rank exchange over the groups of their replicas.

    Raises:
        InputError: one line for every stage that is not the share which the program gives to this rank.
    """
    problems = []
    for (stage, _), ranks in program.obligations.owners.items():
        if rank not in ranks:
            continue
        module = stages[stage]
        given, wanted = tensor_ranks(module), (ranks.index(rank), len(ranks))
        if (given.place, given.size) != wanted:
            problem = f"rank {rank} was given share {given.place} of {given.size}, the program gives it"
            problems.append(Violation(f"stage {stage}", f"{problem} {wanted[0]} of {wanted[1]}"))
        elif given.size > 1:
            given.connect(groups[ranks])
    if problems:
        raise InputError(problems)


def disconnect_stages(stages: Mapping[int, nn.Module]) -> None:
    """Let stages forget the groups that they were connected to."""
    for module in stages.values():
        tensor_ranks(module).disconnect()


class SummedGradients:
    """Gradients of one stage that its tensor ranks must add up: each has those of its own tokens.

    Args:
        module: the stage.
        layout, flat: where its gradients are.
    """

    def __init__(self, module: TensorParallel, layout: FlatLayout, flat: torch.Tensor) -> None:
        wanted = {id(parameter) for parameter in module.summed_parameters()}
        pairs = zip(layout.parameters, layout.views(flat), strict=True)
        self._views = [view for parameter, view in pairs if id(parameter) in wanted]
        self._ranks = module.tensor

    def add_up(self) -> None:
        """Make them equal on all ranks; blocks, and every rank calls it."""
        total = summed(torch.cat([view.flatten() for view in self._views]), self._ranks.group)
        parts = total.split([view.numel() for view in self._views])
        for view, part in zip(self._views, parts, strict=True):
            view.copy_(part.view_as(view))


def summed_gradients(
    stages: Mapping[int, nn.Module], layouts: Mapping[int, FlatLayout], flats: Mapping[int, torch.Tensor]
) -> dict[int, SummedGradients]:
    """By stage, what a rank adds up with others before the stage's gradient is whole."""
    return {
        stage: SummedGradients(module, layouts[stage], flats[stage])
        for stage, module in stages.items()
        if isinstance(module, TensorParallel) and module.summed_parameters()
    }


def last_gradients(program: Program, rank: int) -> frozenset[int]:
    """Positions of a rank's computations after which their stage's gradient is reduced or stepped with."""
    last: dict[int, int] = {}
    found = set()
    for position in range(int(program.rank_starts[rank]), int(program.rank_starts[rank + 1])):
        kind, stage = (int(column[position]) for column in (program.columns.kind, program.columns.stage))
        if kind in MAKES_GRADIENTS:
            last[stage] = position
        elif kind in (REDUCE, STEP) and stage in last:
            found.add(last.pop(stage))
    return frozenset(found)


def counted_once(
    module: nn.Module, layout: FlatLayout, flat: torch.Tensor, first: int
) -> tuple[torch.Tensor, ...]:
    """The parts of `flat`, elements from `first` on of a stage's flat tensors, that this rank answers for.

    Of what tensor ranks all have, the first one does.
    """
    if not isinstance(module, TensorParallel) or module.tensor.place == 0:
        return (flat,)
    divided = {id(one) for name, one in module.named_parameters() if name in module.divisions}
    parts = []
    for index, start, end in layout.within(first, first + len(flat)):
        if id(layout.parameters[index]) in divided:
            begins = layout.starts[index] - first
            parts.append(flat[begins + start : begins + end])
    return tuple(parts)
