"""The loads of experts in a step: tokens of each expert, and how unequal they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.methods.expert_balance.report import DROPPED, FIGURES, LOADS, RANK_LOAD
from weft.methods.expert_balance.runtime.layer import Parts
from weft.sync.base import Group


def loads_of(
    layers: Sequence[int],
    experts: int,
    roots: Mapping[int, Sequence[torch.Tensor]],
    copies: Mapping[int, int],
    group: Group,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return the tokens of each expert (layers x experts,) and numbers (); every rank of the group calls it.

    Args:
        layers: the positions of all layers with experts of the model.
        roots: those of this rank's passes, by layer.
        copies: the number of ranks that have the same roots, by layer.
    """
    sums = torch.zeros(len(layers), 2 * experts + 1, dtype=torch.float64, device=device)
    for layer, each in roots.items():
        for root in each:
            scores, _, _, counts, dropped = Parts.of(root)
            sums[layers.index(layer)] += torch.cat([scores, counts, dropped]) / copies[layer]
    if group.size > 1:
        group.all_reduce(sums)
    scores, counts, dropped = sums.split([experts, experts, 1], dim=1)
    # Scores of a token add up to 1. A step without tokens has no balance.
    scores = scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    loads = experts * counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    # Frozen layers count nothing.
    counted = (counts.sum(1) > 0).double()
    share = counted / counted.sum().clamp(min=1.0)
    each = (loads * scores).sum(1), loads.amax(1) - 1.0, loads.std(1, correction=0)
    numbers = ((share * one).sum() for one in each)
    lost = {DROPPED: dropped.sum() / counts.sum().clamp(min=1.0)}
    return {LOADS: counts.flatten(), **dict(zip(FIGURES, numbers, strict=True)), **lost}


def rank_load_of(loads: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tokens of the busiest rank over the mean, (), by name: the mean of layers that counted any.

    Args:
        loads: tokens of each expert, (layers x experts,).
        places: the expert of each slot, (layers, ranks, slots).
    """
    layers, ranks, slots = places.shape
    tokens = loads.view(layers, -1).gather(1, places.view(layers, -1)).view(layers, ranks, slots).sum(2)
    counted = tokens.sum(1) > 0
    busiest = tokens.amax(1) / tokens.mean(1).clamp(min=1.0)
    return {RANK_LOAD: (busiest * counted).sum() / counted.sum().clamp(min=1)}
