"""`Census`: the experts that the tokens of an evaluation choose, by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.describe.decoder import Experts
from weft.methods.expert_balance.runtime.losses import Routed, scores_of
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
        self._sums = torch.zeros(len(layers), 2 + experts.count, dtype=torch.float64, device=device)

    def see(self, layer: int, routed: Routed) -> None:
        """Count the tokens of a pass."""
        scores = scores_of(at_least_fp32(routed.logits), self._scores)
        experts = scores.shape[1]
        own = self._sums[self._places[layer]]
        own[0] += len(scores)
        own[1] += scores.gather(1, routed.chosen).sum()
        own[2:] += torch.bincount(routed.chosen.flatten(), minlength=experts)

    def collect(self) -> list[Mapping[str, Any]]:
        """Return, for each layer, the shares of tokens that choose each expert, and the mean of their scores.

        Every rank calls it. Tensor ranks see the same tokens, each all of them, so means stay.
        """
        sums = np.sum(gather(self._sums.tolist()), axis=0)
        tokens = np.maximum(sums[:, 0], 1.0)
        rates, scores = sums[:, 2:] / tokens[:, None], sums[:, 1] / tokens
        pairs = zip(rates.tolist(), scores.tolist(), strict=True)
        return [{"rates": each, "chosen_scores": score} for each, score in pairs]
