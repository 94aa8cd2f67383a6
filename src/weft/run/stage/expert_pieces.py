"""`ExpertCut`: a stage cut where rows of its mixtures go to their experts and come back.

A block with experts is in three pieces: attention, router and sorted rows; the experts; the sums by token.
Shared experts compute in the first piece. The exchanges are those of `ExpertRanks`.

Tensor ranks divide the columns of all experts, and exchange inside of the pieces. They enter a mixture in its
first piece. In its last piece they add up partial results, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from weft.run.parallel.expert_ranks import Dispatch, ExpertRanks
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.experts import Sorted, add_results, compute_rows
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch, PieceBorder, PieceList, StagePiece, State
from weft.sync.base import Group


@runtime_checkable
class WithMixtures(Protocol):
    """A stage that may have mixtures, which expert ranks divide."""

    expert: ExpertRanks
    tensor: TensorRanks

    def experts(self) -> dict[int, Any]:
        """Return the experts of mixtures by the positions of their layers."""
        ...

    def functions_or_branches(self, inputs: torch.Tensor) -> Sequence[LayerFunction | tuple[Branch, Branch]]:
        """Return the stage's layers; of a block with experts, the branches of attention and mixture."""
        ...


class ExpertCut:
    """A way to cut a stage with mixtures (`StageCut`)."""

    def __init__(self, stage: WithMixtures) -> None:
        self._stage = stage

    @classmethod
    def of(cls, module: nn.Module) -> ExpertCut | None:
        return cls(module) if isinstance(module, WithMixtures) else None

    @property
    def borders(self) -> Sequence[PieceBorder]:
        """Two for every mixture, before its experts and behind them."""
        return [PieceBorder(forward=True, backward=True)] * (2 * len(self._stage.experts()))

    def pieces(self, inputs: torch.Tensor) -> Sequence[StagePiece]:
        found, mixtures = PieceList(), iter(self._stage.experts().values())
        for one in self._stage.functions_or_branches(inputs):
            if not isinstance(one, tuple):
                found.compute(one)
                continue
            attention, mixture = one
            found.compute(attention.run)
            MixturePass(mixture, next(mixtures), self._stage).append(found)
        return found.pieces

    def exchanging_elsewhere(self) -> AbstractContextManager[None]:
        return self._stage.expert.exchanging_elsewhere()


class MixturePass:
    """A micro-batch's way through one mixture: its rows, and their route once ranks have gathered counts.

    Args:
        branch: the mixture beside the stream.
        experts: its experts; they have no common type.
        stage: its expert ranks meet nobody here; its tensor ranks do.
    """

    def __init__(self, branch: Branch, experts: Any, stage: WithMixtures) -> None:
        self._branch, self._experts = branch, experts
        self._ranks, self._tensor = stage.expert, stage.tensor
        self._places: Sorted | None = None
        self._route: Dispatch | None = None

    def append(self, found: PieceList) -> None:
        """Append the mixture to a stage's pieces, with its two borders."""
        found.append(self._scatter)
        found.cross(self._dispatch)
        found.append(self._compute)
        found.cross(self._combine)
        found.append(self._add_up)

    def _scatter(self, state: State) -> State:
        """Return the rows, the weights of tokens' experts, the sums of shared experts, and the stream."""
        (stream,) = state
        entered = self._tensor.enter(self._branch.before(stream))
        # Without the sums of its experts, a mixture gives those of the shared ones, or zeros. Partial ones
        # of tensor ranks wait for those of the experts.
        with self._tensor.exchanging_elsewhere():
            shared = self._branch.inside(entered)
        rows, weights, self._places = self._ranks.left.pop()
        return rows, weights, shared, stream

    def _compute(self, state: State) -> State:
        received, *others = state
        return compute_rows(self._experts, received, self._known_route.counts), *others

    def _add_up(self, state: State) -> State:
        results, weights, shared, stream = state
        assert self._places is not None, "rows are scattered first"
        summed = add_results(results, weights, self._places).view_as(shared)
        return (self._branch.after(self._tensor.leave(summed + shared), stream),)

    def _dispatch(self, value: torch.Tensor, group: Group, *, backward: bool) -> torch.Tensor:
        """Send rows to their experts, or their gradients back; forward, the ranks gather counts first.

        Experts get rows in their own order, which their products keep.
        """
        if backward:
            return self._given_back(value)
        ranks = ExpertRanks(group.place, group.size)
        ranks.per_node = self._ranks.per_node
        ranks.connect(group)
        assert self._places is not None, "rows are scattered first"
        self._route = ranks.route(self._places.counts)
        return self._given_to_experts(value)

    def _combine(self, value: torch.Tensor, group: Group, *, backward: bool) -> torch.Tensor:
        """Return the results of this rank's rows, or the gradients of results that its experts made."""
        return self._given_to_experts(value) if backward else self._given_back(value)

    def _given_to_experts(self, value: torch.Tensor) -> torch.Tensor:
        return self._known_route.by_expert(self._known_route.send(value))

    def _given_back(self, value: torch.Tensor) -> torch.Tensor:
        return self._known_route.send_back(self._known_route.by_sender(value))

    @property
    def _known_route(self) -> Dispatch:
        assert self._route is not None, "counts are gathered first"
        return self._route
