"""The runtime's interface to a stage that several ranks of a replica divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.replica_ranks import ReplicaRanks
from weft.run.parallel.tensor_layers import Division
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.state.bucket import FlatLayout
from weft.sync.base import Group

# Elements of a gradient that context ranks add up at once: they bound the memory of the exchange.
SUMMED_ELEMENTS = 2**22


@runtime_checkable
class TensorParallel(Protocol):
    """A stage that tensor ranks may share; `divisions` has the divided parameters, all others are whole."""

    tensor: TensorRanks
    divisions: Mapping[str, Division]

    def summed_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the whole parameters with gradients to add up: each rank makes a part."""
        ...


def tensor_ranks(module: nn.Module) -> TensorRanks:
    """Return the ranks that divide a stage; a single rank if the module states none."""
    return module.tensor if isinstance(module, TensorParallel) else TensorRanks()


def context_ranks(module: nn.Module) -> ContextRanks:
    """Return the ranks that divide the tokens of a stage, its `context`; a single rank if it has none."""
    ranks = getattr(module, "context", None)
    return ranks if isinstance(ranks, ContextRanks) else ContextRanks()


def leads_replica(module: nn.Module) -> bool:
    """Return True if this rank is the first of the stage's replica."""
    return all(ranks.place == 0 for ranks in _axes(module))


def _axes(module: nn.Module) -> tuple[ReplicaRanks, ReplicaRanks]:
    """Return the ranks that divide the stage's layers, and those that divide its tokens."""
    return tensor_ranks(module), context_ranks(module)


def own_share(module: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return the stage's share of a whole parameter, or of a state of its shape, by the parameter's name."""
    if isinstance(module, TensorParallel) and name in module.divisions:
        return module.divisions[name].own(whole, module.tensor)
    return whole


def connect_stages(
    plan: Plan, rank: int, stages: Mapping[int, nn.Module], groups: Mapping[tuple[int, ...], Group]
) -> None:
    """Let the stages of a rank exchange over the groups of their replicas.

    Args:
        groups: those that divide layers and those that divide tokens, by their ranks.

    Raises:
        InputError: one line for every stage that is not the share which the plan gives to this rank.
    """
    problems = []
    for stage, ranks in plan.stages_of(rank).items():
        for given, along in zip(_axes(stages[stage]), plan.grid(stage).groups(ranks), strict=True):
            group = next(one for one in along if rank in one)
            place, size = group.index(rank), len(group)
            if (given.place, given.size) != (place, size):
                problem = f"rank {rank} was given {given.name} share {given.place} of {given.size}"
                problems.append(
                    Violation(f"stage {stage}", f"{problem}, the plan gives it {place} of {size}")
                )
            elif size > 1:
                given.connect(groups[group])
    if problems:
        raise InputError(problems)


def disconnect_stages(stages: Mapping[int, nn.Module]) -> None:
    """Let stages forget the groups that they were connected to."""
    for module in stages.values():
        for ranks in _axes(module):
            ranks.disconnect()


class SummedGradients(Protocol):
    """Gradients that ranks of a replica add up, because each rank has the part of its own tokens."""

    def add_up(self) -> None:
        """Make the gradients equal on all ranks; blocks, and every rank calls it."""
        ...


class StreamGradients:
    """Gradients of the parameters that tensor ranks have whole and use on the divided stream.

    Args:
        module: the stage.
        layout, flat: the layout of its gradients, and their flat tensor.
    """

    def __init__(self, module: TensorParallel, layout: FlatLayout, flat: torch.Tensor) -> None:
        wanted = {id(parameter) for parameter in module.summed_parameters()}
        pairs = zip(layout.parameters, layout.views(flat), strict=True)
        self._views = [view for parameter, view in pairs if id(parameter) in wanted]
        self._ranks = module.tensor

    def add_up(self) -> None:
        total = self._ranks.add_up(torch.cat([view.flatten() for view in self._views]))
        parts = total.split([view.numel() for view in self._views])
        for view, part in zip(self._views, parts, strict=True):
            view.copy_(part.view_as(view))


class WholeGradient:
    """The gradient of a rank's whole stage; each context rank has the part of its tokens.

    Args:
        flat: the gradient, shape (n,).
    """

    def __init__(self, ranks: ContextRanks, flat: torch.Tensor) -> None:
        self._ranks = ranks
        self._flat = flat

    def add_up(self) -> None:
        for piece in self._flat.split(SUMMED_ELEMENTS):
            piece.copy_(self._ranks.add_up(piece))


def summed_gradients(
    stages: Mapping[int, nn.Module], layouts: Mapping[int, FlatLayout], flats: Mapping[int, torch.Tensor]
) -> dict[int, tuple[SummedGradients, ...]]:
    """Return, by stage, the gradients that a rank adds up with others, in this order, to complete them."""
    found: dict[int, tuple[SummedGradients, ...]] = {}
    for stage, module in stages.items():
        sums: list[SummedGradients] = []
        if isinstance(module, TensorParallel) and module.summed_parameters():
            sums.append(StreamGradients(module, layouts[stage], flats[stage]))
        # A stage may have only a copy of a tied weight.
        if (context := context_ranks(module)).size > 1 and len(flats[stage]):
            sums.append(WholeGradient(context, flats[stage]))
        found[stage] = tuple(sums)
    return found


def counted_once(
    module: nn.Module, layout: FlatLayout, flat: torch.Tensor, first: int
) -> tuple[torch.Tensor, ...]:
    """Return the parts of `flat`, elements from `first` on of a stage's flat tensors, that this rank counts.

    The first rank of a replica counts the elements that all its ranks have.
    """
    if context_ranks(module).place > 0:
        return ()
    if not isinstance(module, TensorParallel) or module.tensor.place == 0:
        return (flat,)
    divided = {id(one) for name, one in module.named_parameters() if name in module.divisions}
    parts = []
    for index, start, end in layout.within(first, first + len(flat)):
        if id(layout.parameters[index]) in divided:
            begins = layout.starts[index] - first
            parts.append(flat[begins + start : begins + end])
    return tuple(parts)
