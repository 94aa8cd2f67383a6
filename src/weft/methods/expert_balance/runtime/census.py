"""`Census`: the experts that the tokens of an evaluation choose, by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.describe.decoder import Experts
from weft.methods.expert_balance.runtime.losses import Routed, scores_of
from weft.program.arrays import Floats
from weft.run.state.precision import at_least_fp32
from weft.training.coordination.agreement import gather


class Census:
    """Sums over the passes of one rank.

    Args:
        layers: the positions of all layers with experts of the model.
    """

    def __init__(self, layers: Sequence[int], experts: Experts, device: torch.device) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._scores = experts.scores
        # Of each layer: tokens, their scores of the experts that they choose, and tokens of each expert.
        self.sums = torch.zeros(len(layers), 2 + experts.count, dtype=torch.float64, device=device)

    def see(self, layer: int, routed: Routed) -> None:
        """Count the tokens of a pass."""
        scores = scores_of(at_least_fp32(routed.logits), self._scores)
        experts = scores.shape[1]
        own = self.sums[self._places[layer]]
        own[0] += len(scores)
        own[1] += scores.gather(1, routed.chosen).sum()
        own[2:] += torch.bincount(routed.chosen.flatten(), minlength=experts)

    def collect(self) -> list[Mapping[str, Any]]:
        """Return what all ranks have counted, as `shares_of`; every rank calls it."""
        return shares_of(np.sum(gather(self.sums.tolist()), axis=0))


def shares_of(sums: Floats) -> list[Mapping[str, Any]]:
    """Return, for each layer, the shares of tokens that choose each expert, and the mean of their scores.

    Tensor ranks count the same tokens, each all of them, which leaves means as they are.

    Args:
        sums: of each layer, as in a census, (layers, 2 + experts).
    """
    tokens = np.maximum(sums[:, 0], 1.0)
    rates, scores = sums[:, 2:] / tokens[:, None], sums[:, 1] / tokens
    pairs = zip(rates.tolist(), scores.tolist(), strict=True)
    return [{"rates": each, "chosen_scores": score} for each, score in pairs]
