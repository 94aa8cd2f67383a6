"""`BalancedLayer`: the root of one mixture, and the gradient of this root.

A root holds sums over the tokens of a pass: scores by expert, and squares of partition functions. Losses of
groups of samples follow, counts by expert, and choices beyond a capacity. Counts have no gradient. The
gradients of the first two follow from counts of other micro-batches and ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.describe.decoder import Experts
from weft.describe.plan import Plan
from weft.methods.expert_balance.options import ExpertsTable
from weft.methods.expert_balance.runtime.losses import loss_of_groups, reaching, rows_of_scores, totals
from weft.methods.expert_balance.runtime.routers import RouterWatch
from weft.run.parallel.divided_logits import IGNORED
from weft.run.stage.experts import Capacity
from weft.run.stage.stage_module import StageModule
from weft.run.stage.taps import Passing


class Parts(NamedTuple):
    """The parts of a root or of its gradient, (2 x experts + 3,): see the module."""

    scores: torch.Tensor
    squares: torch.Tensor
    groups: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor

    @classmethod
    def of(cls, root: torch.Tensor) -> Parts:
        experts = (len(root) - 3) // 2
        return cls(*root.split([experts, 1, 1, experts, 1]))


class BalancedLayer:
    """One mixture of a stage.

    Args:
        stage: the stage, and `index` its number.
        watch: the view of the mixture's router.
        capacity: of the mixture's experts, if they have one.
    """

    def __init__(
        self,
        table: ExpertsTable,
        plan: Plan,
        stage: StageModule,
        index: int,
        watch: RouterWatch,
        capacity: Capacity | None,
    ) -> None:
        experts = stage.config.architecture.experts
        assert experts is not None, "only layers with experts are balanced"
        self.experts: Experts = experts
        self._table, self._plan, self._stage, self._watch = table, plan, stage, watch
        self._samples = plan.size_of(index) // plan.ep
        self._grouped = not table.counts or table.micro_weight > 0
        self._groups = self._samples // table.group_samples if self._grouped else 1
        self._z_of_groups = 0.0 if table.counts else table.z_weight
        self._capacity = capacity

    @property
    def copies(self) -> int:
        """The number of ranks that route each token of this rank."""
        return self._stage.tensor.size

    def has_routed(self) -> bool:
        """Return True if the running pass has chosen experts, and no root knows them yet."""
        return self._watch.has_routed

    def forget(self) -> None:
        """Drop what the router has decided in a layer that has run again."""
        self._watch.forget()

    def make(self, now: Passing, output: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Return the root of a forward pass that has just run the layer."""
        routed, experts, table = self._watch.take(), self.experts, self._table
        counting = self._counting(targets, routed.logits)
        found = totals(routed, counting, self._groups, experts.scores, squares=table.z_weight > 0)
        local = found.squares.new_zeros(())
        if self._grouped:
            # Expert ranks have samples of their own, and context ranks other tokens of the same samples.
            ranks = self._stage.context
            local = loss_of_groups(found, experts.active, table.local_weight, self._z_of_groups, ranks)
        dropped = found.squares.new_zeros(1)
        if self._capacity is not None:
            lost = ~self._capacity.keeps(routed.chosen, experts.count)
            dropped = (lost.sum(1).view_as(counting) * counting).sum().view(1).to(dropped.dtype)
        sums = found.scores.sum(0), found.squares.sum().view(1), local.view(1), found.counts.sum(0), dropped
        return torch.cat(sums)

    def gradient(self, counts: torch.Tensor, counted: torch.Tensor, share: float) -> torch.Tensor:
        """Return the gradient of the root of a pass.

        Args:
            counts: of the tokens over which experts are balanced, (experts,); zeros for groups alone.
            counted: of the tokens whose mean is the loss, (experts,).
            share: of this loss in the whole balance loss.
        """
        table = self._table
        scores, squares = rows_of_scores(
            counts, counted, self.experts.active, share * table.shared_weight, share * table.z_weight
        )
        # Each tensor rank routes all tokens, and adds its part of the router's gradient.
        groups = self._plan.global_batch / table.group_samples * self.copies
        of_counts = scores.new_zeros(len(scores) + 1)
        return torch.cat([scores, squares.view(1), scores.new_full((1,), 1.0 / groups), of_counts])

    def _counting(self, targets: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Return which of the rank's tokens count, (samples, tokens); without known targets all do."""
        sequence = self._plan.sequence
        if targets is None or targets.ndim != 2 or targets.shape[1] < sequence:
            return logits.new_ones(self._samples, len(logits) // self._samples)
        return self._stage.token_ranks.own_tokens(reaching(targets, sequence, IGNORED))
