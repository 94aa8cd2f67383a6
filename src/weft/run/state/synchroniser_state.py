"""The memory of synchronisers, per stage of a rank, as states of methods."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from weft.run.methods import MethodState
from weft.run.state.bucket import GradientBucket
from weft.run.state.shards import ReplicaWeights
from weft.sync.base import CarryingSynchroniser, StatefulSynchroniser

if TYPE_CHECKING:
    from weft.run.resources import Resources

SYNCHRONISER, REPLICAS = "synchroniser", "replicas"
# The sum of all replicas' remainders of a parameter, in a checkpoint.
UNSENT = "unsent"


class SynchroniserState(MethodState):
    """State per stage, of this rank alone: replicas may have different unsent remainders.

    A checkpoint also keeps the sum of all remainders by parameter, if the synchroniser can carry it on.
    """

    def __init__(self, synchroniser: StatefulSynchroniser) -> None:
        self._synchroniser = synchroniser
        self._buckets: Mapping[int, GradientBucket] = {}
        self._names: dict[int, list[str]] = {}
        # By stage: sums to save, and rooms to load sums into.
        self._sums: dict[int, torch.Tensor] = {}
        self._rooms: dict[int, torch.Tensor] = {}

    def begin(self, resources: Resources) -> None:
        self._buckets = resources.buckets
        for stage, bucket in resources.buckets.items():
            names = {id(one): name for name, one in resources.stages[stage].named_parameters()}
            self._names[stage] = [names[id(one)] for one in bucket.parameters]
        self.rebase()

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        """Add up the remainders of all replicas; return `own`."""
        if isinstance(self._synchroniser, CarryingSynchroniser):
            sums = {stage: self._synchroniser.carried(stage) for stage in self._buckets}
            self._sums = {stage: one for stage, one in sums.items() if one is not None}
        return own

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return sums that were added up, and forget them; otherwise rooms to load sums into."""
        if not isinstance(self._synchroniser, CarryingSynchroniser):
            return {}
        flats, self._sums = self._sums, {}
        if not flats:
            flats = self._rooms = {
                stage: torch.zeros_like(bucket.flat) for stage, bucket in self._buckets.items()
            }
        return {
            f"{name}/{UNSENT}": flat[start : start + prod(shape)].view(shape)
            for stage, flat in flats.items()
            for name, (start, shape) in zip(self._names[stage], self._buckets[stage].places, strict=True)
        }

    def resume(self) -> None:
        self._rooms = {}

    def rebase(self) -> None:
        for stage, bucket in self._buckets.items():
            self._synchroniser.begin(stage, torch.zeros_like(bucket.flat))
        if isinstance(self._synchroniser, CarryingSynchroniser):
            for stage, flat in self._rooms.items():
                self._synchroniser.carry_on(stage, flat)
        self._rooms = {}

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
