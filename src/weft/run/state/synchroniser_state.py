"""The memory of synchronisers, per stage of a rank, as states of methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.run.methods import MethodState
from weft.run.state.shards import ReplicaWeights
from weft.sync.base import StatefulSynchroniser

if TYPE_CHECKING:
    from weft.run.resources import Resources

SYNCHRONISER, REPLICAS = "synchroniser", "replicas"


class SynchroniserState(MethodState):
    """State per stage, of this rank alone: replicas may have different unsent remainders."""

    def __init__(self, synchroniser: StatefulSynchroniser) -> None:
        self._synchroniser = synchroniser
        self._like: dict[int, torch.Tensor] = {}

    def begin(self, resources: Resources) -> None:
        self._like = {stage: bucket.flat for stage, bucket in resources.buckets.items()}
        self.rebase()

    def rebase(self) -> None:
        for stage, flat in self._like.items():
            self._synchroniser.begin(stage, torch.zeros_like(flat))

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._synchroniser.tensors()


class ReplicaState(MethodState):
    """The weights that all replicas have, of which a checkpoint keeps the own range of each rank.

    Attributes:
        weights: by stage.
    """

    def __init__(self) -> None:
        self.weights: Mapping[int, ReplicaWeights] = {}

    def begin(self, resources: Resources) -> None:
        weights = {stage: shard.weights for stage, shard in resources.shards.items()}
        self.weights = {stage: one for stage, one in weights.items() if isinstance(one, ReplicaWeights)}

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        shown = {f"shown/{stage}": one.shown for stage, one in self.weights.items()}
        return shown | {f"steps/{stage}": one.steps for stage, one in self.weights.items()}

    def resume(self) -> None:
        for one in self.weights.values():
            one.resume()

    def rebase(self) -> None:
        for one in self.weights.values():
            one.rebase()
