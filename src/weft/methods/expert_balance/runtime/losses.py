"""The tensors of a balance: totals of a pass, and the gradients of these totals.

T tokens choose K of E experts each. Of them, c(i) choose expert i, whose mean score is P(i). The loss is E
times the sum of c(i) P(i) / (K T): 1 for equal experts. Counts have no gradient (Qiu et al., arXiv
2501.11873, equations 2 to 6). So all tokens have one gradient of their scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.describe.decoder import Scores
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.state.precision import at_least_fp32


class Routed(NamedTuple):
    """The decisions of a router for the tokens of a pass.

    Attributes:
        logits: (tokens, experts).
        chosen: the experts of each token, (tokens, choices).
    """

    logits: torch.Tensor
    chosen: torch.Tensor


class Totals(NamedTuple):
    """Sums over the tokens of each group of samples.

    Attributes:
        scores: of each expert, (groups, experts).
        squares: of the logarithm of the sum of exponentials of logits, (groups,).
        counts: tokens of each expert, without a gradient, (groups, experts).
    """

    scores: torch.Tensor
    squares: torch.Tensor
    counts: torch.Tensor


def scores_of(logits: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return scores (tokens, experts) that add up to 1 for each token."""
    if scores == "softmax":
        return logits.softmax(-1)
    each = logits.sigmoid()
    return each / (each.sum(-1, keepdim=True) + 1e-20)


def totals(
    routed: Routed, valid: torch.Tensor, groups: int, scores: Scores, *, squares: bool = True
) -> Totals:
    """Return the sums over groups of equally many samples, one after the other.

    Args:
        valid: 1 for tokens that count, 0 for others, (samples, tokens).
        squares: False leaves sums of squares 0, and keeps no logits.
    """
    logits = at_least_fp32(routed.logits)
    weights = valid.reshape(groups, -1).to(logits.dtype)
    own = scores_of(logits, scores).view(groups, -1, logits.shape[-1])
    counts = logits.new_zeros(groups, logits.shape[-1])
    chosen = routed.chosen.reshape(groups, -1)
    counts.scatter_add_(1, chosen, weights.repeat_interleave(routed.chosen.shape[-1], 1))
    sums = logits.new_zeros(groups)
    if squares:
        sums = (logits.logsumexp(-1).square().view(groups, -1) * weights).sum(1)
    return Totals(torch.einsum("gte,gt->ge", own, weights), sums, counts)


def loss_of_groups(
    found: Totals, choices: int, weight: float, z_weight: float, ranks: TokenRanks
) -> torch.Tensor:
    """Return the sum over groups of their balance losses and squares, of this rank's tokens; shape ().

    Args:
        ranks: those that have other tokens of the same groups.
    """
    counts = found.counts if ranks.size == 1 else ranks.gather(found.counts).sum(0)
    selected = counts.sum(1).clamp(min=1.0)
    shares, tokens = counts / selected.unsqueeze(1), selected / choices
    balance = counts.shape[1] * (shares * found.scores).sum(1)
    losses: torch.Tensor = (weight * balance + z_weight * found.squares) / tokens
    return losses.sum()


def rows_of_scores(
    counts: torch.Tensor, counted: torch.Tensor, choices: int, weight: float, z_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the sums of scores (experts,) and of squares () of tokens counted together.

    Args:
        counts: of the tokens over which experts are balanced, (experts,).
        counted: of the tokens whose mean is the loss, (experts,).
    """
    tokens = counted.sum().clamp(min=1.0) / choices
    shares = counts / counts.sum().clamp(min=1.0)
    return weight * len(counts) * shares / tokens, z_weight / tokens


def reaching(targets: torch.Tensor, tokens: int, ignored: int) -> torch.Tensor:
    """Return which tokens can reach a loss, (samples, tokens): those up to the last target of a sample.

    Args:
        targets: (samples, at least `tokens`), `ignored` where there is none.
    """
    asked = (targets[:, :tokens] != ignored).to(torch.int8)
    return asked.flip(1).cummax(1).values.flip(1)
