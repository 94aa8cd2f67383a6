"""`KeptState`: the whole state of a rank between two steps, in memory, to which it can go back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from weft.run.runtime import RankRuntime
from weft.training.checkpoint.stage_tensors import model_slots, model_tensors
from weft.training.checkpoint.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class KeptState:
    """Copies, in host memory, of all tensors that a rank goes on from."""

    state: TrainingState
    weights: Mapping[str, torch.Tensor]
    optimizers: Mapping[int, Mapping[str, Any]]
    methods: Mapping[tuple[str, str], torch.Tensor]

    @classmethod
    def of(cls, runtime: RankRuntime, state: TrainingState) -> KeptState:
        """Copy a rank's tensors, after all work of the last step has ended."""
        runtime.catch_up()
        weights = model_tensors(runtime.stages, runtime.stepped)
        return cls(
            state,
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()},
            {stage: _copied(one.state_dict()) for stage, one in runtime.optimizers.items()},
            {name: tensor.to("cpu", copy=True) for name, tensor in _tensors_of_methods(runtime).items()},
        )

    @torch.no_grad()
    def restore(self, runtime: RankRuntime) -> None:
        """Give the tensors to another runtime of this rank's replica."""
        for name, slot in model_slots(runtime.stages, runtime.stepped).items():
            slot.whole.copy_(self.weights[name])
            slot.fill()
        for stage, one in runtime.optimizers.items():
            # The optimizer would step tensors of this state in place.
            one.load_state_dict(_copied(self.optimizers[stage]))
        for key, tensor in _tensors_of_methods(runtime).items():
            tensor.copy_(self.methods[key])
        for method in runtime.methods.values():
            method.resume()
        for stepped in runtime.stepped.values():
            stepped.publish()


def _copied(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's `state_dict` in host memory."""

    def copied(value: Any) -> Any:
        return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)

    return {
        "state": {
            key: {leaf: copied(value) for leaf, value in one.items()} for key, one in states["state"].items()
        },
        "param_groups": deepcopy(states["param_groups"]),
    }


def _tensors_of_methods(runtime: RankRuntime) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): tensor
        for name, method in runtime.methods.items()
        for key, tensor in {**method.tensors(), **method.rank_tensors()}.items()
    }
