"""Rankings of training samples by how bad they seem: by suppressed length, gradient norm, and loss.

A score is the mean over the steps of a window in which the sample, or its micro-batch, was seen.
"""

from __future__ import annotations

import torch
from stacked_training import Seen

EARLY, LATE = "early", "late"
SUPPRESSED, NORM, LOSS = "suppressed", "norm", "loss"


def separation(scores: torch.Tensor, bad: torch.Tensor) -> float | None:
    """The area under the curve of a ranking: how often a bad sample is above a good one; ties count half.

    It is None where one of both kinds is missing.
    """
    high, low = scores[bad].unsqueeze(1), scores[~bad]
    if not len(high) or not len(low):
        return None
    return ((high > low).double().mean() + 0.5 * (high == low).double().mean()).item()


def mean_scores(values: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """The mean value of each of `count` samples, not a number if unseen; values and chosen are alike."""
    times = torch.zeros(count).index_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
    sums = torch.zeros(count).index_add_(0, chosen.flatten(), values.flatten())
    return sums / times


def separations(seen: Seen, window: float) -> dict[str, list[float]]:
    """The areas of all runs, by score and window, which is the first or last share of the steps.

    Without bad samples there are none. Under the least norm, the suppressed share of a gradient's length is
    1 - least / norm.
    """
    runs, steps, batch = seen.chosen.shape
    length = max(1, round(window * steps))
    values = {
        SUPPRESSED: 1.0 - seen.norms.amin(2, keepdim=True) / seen.norms.clamp(min=1e-30),
        NORM: seen.norms,
        LOSS: seen.losses,
    }
    found: dict[str, list[float]] = {}
    for name, all_values in values.items():
        each = all_values.repeat_interleave(batch // all_values.shape[2], dim=2)
        for place, part in ((EARLY, slice(length)), (LATE, slice(steps - length, steps))):
            for run in range(runs):
                bad = seen.bad[run]
                scores = mean_scores(each[run, part], seen.chosen[run, part], len(bad))
                known = scores.isfinite()
                area = separation(scores[known], bad[known])
                if area is not None:
                    found.setdefault(f"{name} {place}", []).append(area)
    return found
