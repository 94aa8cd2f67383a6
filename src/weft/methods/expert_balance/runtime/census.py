"""`Census`: the experts that the tokens of an evaluation choose, by layer, and what balances say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.describe.decoder import Experts
from weft.methods.expert_balance.runtime.losses import Routed, scores_of, totals
from weft.program.arrays import Floats
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.state.precision import at_least_fp32
from weft.training.coordination.agreement import gather


class Census:
    """Sums over the passes of one rank.

    Args:
        layers: the positions of all layers with experts of the model.
        sequence: the tokens of a sample.
    """

    def __init__(
        self, layers: Sequence[int], experts: Experts, device: torch.device, *, sequence: int
    ) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._experts, self._sequence = experts, sequence
        # Of each layer: tokens, their scores of the experts that they choose, the balance losses of samples
        # times their tokens, and by expert the tokens and the sums of scores.
        self.sums = torch.zeros(len(layers), 3 + 2 * experts.count, dtype=torch.float64, device=device)

    def see(self, layer: int, ranks: TokenRanks, routed: Routed) -> None:
        """Count the tokens of a pass; `ranks` have other tokens of the same samples."""
        samples = len(routed.logits) * ranks.size // self._sequence
        valid = routed.logits.new_ones(samples, len(routed.logits) // samples)
        found = totals(routed, valid, samples, self._experts.scores, squares=False)
        each = torch.cat([found.counts, found.scores], 1).double()
        own, count = self.sums[self._places[layer]], self._experts.count
        own[0] += len(routed.logits)
        own[1] += chosen_scores(routed, self._experts).sum()
        own[3:] += each.sum(0)
        # Ranks with parts of samples add an equal part of their losses each.
        whole = each if ranks.size == 1 else ranks.gather(each).sum(0)
        products = (whole[:, :count] * whole[:, count:]).sum(1)
        own[2] += count * (products / whole[:, :count].sum(1)).sum() / ranks.size

    def collect(self) -> list[Mapping[str, Any]]:
        """Return what all ranks have counted, as `shares_of`; every rank calls it."""
        return shares_of(np.sum(gather(self.sums.tolist()), axis=0))


def chosen_scores(routed: Routed, experts: Experts) -> torch.Tensor:
    """Return the scores of each token's experts, (tokens, choices)."""
    return scores_of(at_least_fp32(routed.logits), experts.scores).gather(1, routed.chosen)


def shares_of(sums: Floats) -> list[Mapping[str, Any]]:
    """Return, for each layer, the shares of tokens that choose each expert, and means of scores.

    `balance` is the balance loss of all tokens together, and `balance_of_samples` the mean of those of
    samples. Their difference, the `slack`, is what a balance of samples takes from experts. It equals the
    experts times the sum of the covariances, over samples, of an expert's share and mean score.

    Tensor ranks count the same tokens, each all of them, which leaves means as they are.

    Args:
        sums: of each layer, as in a census, (layers, 3 + 2 x experts).
    """
    experts = (sums.shape[1] - 3) // 2
    tokens = np.maximum(sums[:, :1], 1.0)
    _, chosen, apart = (sums[:, :3] / tokens).T
    rates, scores = (sums[:, 3:] / tokens).reshape(-1, 2, experts).swapaxes(0, 1)
    shares = rates / np.maximum(rates.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    together = experts * (shares * scores).sum(1)
    columns = {
        "rates": rates,
        "scores": scores,
        "chosen_scores": chosen,
        "balance": together,
        "balance_of_samples": apart,
        "slack": apart - together,
    }
    return [{name: one[layer].tolist() for name, one in columns.items()} for layer in range(len(sums))]
