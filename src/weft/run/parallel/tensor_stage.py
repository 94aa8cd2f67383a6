"""The runtime's interface to a stage that several ranks of a replica divide."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.replica_ranks import ReplicaRanks
from weft.run.parallel.tensor_layers import Division, Share
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.parallel.token_grid import TokenGrid
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.state.bucket import FlatLayout
from weft.sync.base import Group

# Elements of a gradient that context ranks add up at once: they bound the memory of the exchange.
SUMMED_ELEMENTS = 2**22


@runtime_checkable
class TensorParallel(Protocol):
    """A stage that ranks may share; `divisions` has the parameters that tensor ranks divide, and `shares`
    those that any ranks do. All others are whole."""

    tensor: TensorRanks
    divisions: Mapping[str, Division]

    @property
    def shares(self) -> Mapping[str, Share]: ...

    def share(self, name: str) -> Share: ...

    def summed_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the whole parameters with gradients to add up: each rank makes a part."""
        ...


def tensor_ranks(module: nn.Module) -> TensorRanks:
    """Return the ranks that divide a stage; a single rank if the module states none."""
    return module.tensor if isinstance(module, TensorParallel) else TensorRanks()


def token_ranks(module: nn.Module) -> TokenRanks:
    """Return the ranks that divide the tokens of a stage, its `token_ranks`; a single rank if it has none."""
    ranks = getattr(module, "token_ranks", None)
    return ranks if isinstance(ranks, TokenRanks) else TokenRanks()


def leads_replica(module: nn.Module) -> bool:
    """Return True if this rank is the first of the stage's replica."""
    return all(ranks.place == 0 for ranks in _axes(module))


def _axes(module: nn.Module) -> tuple[ReplicaRanks, ...]:
    """Return the ranks along the axes of a `ReplicaGrid`: of layers, of tokens, of experts and samples."""
    return tensor_ranks(module), *_token_axes(module)


def _token_axes(module: nn.Module) -> tuple[TokenRanks, TokenRanks]:
    """Return the ranks that divide a stage's tokens, and those that divide its experts and samples."""
    tokens = token_ranks(module)
    if isinstance(tokens, TokenGrid):
        return tokens.context, tokens.expert
    if isinstance(tokens, ExpertRanks):
        return ContextRanks(), tokens
    return tokens, ExpertRanks()


def own_share(module: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return the stage's share of a whole parameter, or of a state of its shape, by the parameter's name."""
    return module.share(name).own(whole) if isinstance(module, TensorParallel) else whole


def connect_stages(
    plan: Plan, rank: int, stages: Mapping[int, nn.Module], groups: Mapping[tuple[int, ...], Group]
) -> None:
    """Let the stages of a rank exchange over the groups of their replicas.

    Args:
        groups: those of each axis inside a replica, by their ranks.

    Raises:
        InputError: one line for every stage that is not the share which the plan gives to this rank.
    """
    problems = []
    for stage, copy in plan.stages_of(rank).items():
        ranks = plan.stages[stage].replicas[copy].ranks
        for given, along in zip(_axes(stages[stage]), plan.grid(stage, copy).groups(ranks), strict=True):
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


class TokenGradients:
    """The gradients of the parameters that all token ranks have; each rank has the part of its tokens.

    Args:
        parts: parts of the stage's gradient, each (n,).
    """

    def __init__(self, ranks: TokenRanks, parts: Sequence[torch.Tensor]) -> None:
        self._ranks = ranks
        self._parts = parts

    def add_up(self) -> None:
        for piece in chain.from_iterable(part.split(SUMMED_ELEMENTS) for part in self._parts):
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
        for tokens in _token_axes(module):
            if tokens.size > 1 and len(flats[stage]):
                sums.append(TokenGradients(tokens, _alike(module, tokens, layouts[stage], flats[stage])))
        found[stage] = tuple(sums)
    return found


def _alike(
    module: nn.Module, tokens: TokenRanks, layout: FlatLayout, flat: torch.Tensor
) -> list[torch.Tensor]:
    """Return the parts of a stage's gradient that are of parameters of all token ranks."""
    own = _divided(module, tokens)
    if not own:
        return [flat]
    found: list[torch.Tensor] = []
    for divided, run in groupby(range(len(layout.parameters)), lambda at: id(layout.parameters[at]) in own):
        places = list(run)
        if not divided:
            last = places[-1]
            found.append(
                flat[layout.starts[places[0]] : layout.starts[last] + layout.parameters[last].numel()]
            )
    return found


def _divided(module: nn.Module, ranks: ReplicaRanks) -> set[int]:
    """Return the identities of the parameters that these ranks of a replica divide."""
    shares = module.shares if isinstance(module, TensorParallel) else {}
    names = {name for name, share in shares.items() if any(one is ranks for _, one in share.along)}
    return {id(one) for name, one in module.named_parameters() if name in names}


def counted_once(
    module: nn.Module, layout: FlatLayout, flat: torch.Tensor, first: int, copies: Collection[int] = ()
) -> tuple[torch.Tensor, ...]:
    """Return the parts of `flat`, elements from `first` on of a stage's flat tensors, that this rank counts.

    The first rank of a replica counts the elements that all its ranks have. Other stages count `copies`, the
    identities of parameters.
    """
    later = [ranks for ranks in _axes(module) if ranks.place > 0]
    if not later and not copies:
        return (flat,)
    own = set(map(id, layout.parameters)).difference(copies)
    own.intersection_update(*(_divided(module, ranks) for ranks in later))
    parts = []
    for index, start, end in layout.within(first, first + len(flat)):
        if id(layout.parameters[index]) in own:
            begins = layout.starts[index] - first
            parts.append(flat[begins + start : begins + end])
    return tuple(parts)
