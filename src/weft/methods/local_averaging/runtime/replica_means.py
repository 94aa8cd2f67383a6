"""`ReplicaMeans`: the weights and states that stand for replicas which step by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from weft.methods.local_averaging.runtime.averaged_part import AveragedPart
from weft.run.methods import MethodState


class ReplicaMeans(MethodState):
    """A state of replicas that differ between meetings; their means stand for all of them.

    Attributes:
        stages: the averaged parts of the rank's stages; a method fills them in `begin`.
    """

    def __init__(self) -> None:
        self.stages: dict[int, tuple[AveragedPart, ...]] = {}

    @property
    def parts(self) -> list[AveragedPart]:
        return [part for parts in self.stages.values() for part in parts]

    @contextmanager
    def settled(self) -> Iterator[None]:
        own = [(part, [one.detach().clone() for one in part.weights]) for part in self.parts]
        for part in self.parts:
            part.give(part.mean(part.weights))
        try:
            yield
        finally:
            for part, weights in own:
                part.give(weights)

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        """Return the means of weights and of their optimizer states, and this replica's counts of steps."""
        # A replica may have left out steps, so its counts are its own.
        found = {name: value if value.ndim else value.clone() for name, value in own.items()}
        for held in self.parts:
            names: dict[torch.dtype, list[str]] = {}
            for name in sorted(own):
                if parameters[name] in held.lengths and own[name].ndim and own[name].is_floating_point():
                    names.setdefault(own[name].dtype, []).append(name)
            for some in names.values():
                found |= dict(zip(some, held.mean([own[name] for name in some]), strict=True))
        return found
