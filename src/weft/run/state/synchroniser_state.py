"""`SynchroniserState`: a synchroniser's memory of gradients, per stage of a rank, as a method's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.run.methods import MethodState
from weft.sync.base import StatefulSynchroniser

if TYPE_CHECKING:
    from weft.run.resources import Resources

NAME = "synchroniser"


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
