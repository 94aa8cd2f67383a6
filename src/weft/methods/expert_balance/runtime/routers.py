"""`RouterWatch`: what the router of a stage's mixture decides in forward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.expert_balance.options import NAME
from weft.methods.expert_balance.runtime.losses import Routed
from weft.run.stage.families.decoder import DecoderStage
from weft.run.stage.stage_module import StageModule

# The attribute of a stage with the watches of its mixtures, by the position of their layers.
WATCHES = "router_watches"


class RouterWatch:
    """A view of one router: the last decisions of training until they are taken, and those of evaluation.

    Attributes:
        evaluated: gets the decisions of passes without gradients.
    """

    def __init__(self, router: nn.Module) -> None:
        self._routed: Routed | None = None
        self.evaluated: Callable[[Routed], None] | None = None
        router.register_forward_hook(self._see)

    def _see(self, router: nn.Module, given: Any, decided: Sequence[torch.Tensor]) -> None:
        logits, _, chosen = decided
        routed = Routed(logits, chosen)
        self._routed = routed if torch.is_grad_enabled() else None
        if self._routed is None and self.evaluated is not None:
            self.evaluated(routed)

    @property
    def has_routed(self) -> bool:
        return self._routed is not None

    def forget(self) -> None:
        """Drop decisions that no root takes: those of a layer that has run again."""
        self._routed = None

    def take(self) -> Routed:
        routed, self._routed = self._routed, None
        assert routed is not None, "a layer with experts runs its router"
        return routed


def watches_of(index: int, stage: nn.Module) -> tuple[StageModule, Mapping[int, RouterWatch]]:
    """Return a stage with the watches of its mixtures.

    Raises:
        InputError: if the stage was built without them.
    """
    watches = getattr(stage, WATCHES, None)
    if not isinstance(stage, StageModule) or watches is None:
        problem = f"its routers are not watched, which the plan's method {NAME} needs"
        raise InputError(Violation(f"stage {index}", problem))
    return stage, watches


def watch_routers(stage: StageModule, layers: Sequence[int], choice: Choice) -> None:
    """Give a stage the watches of its mixtures."""
    routers = stage.routers() if isinstance(stage, DecoderStage) else {}
    setattr(stage, WATCHES, {layer: RouterWatch(router) for layer, router in routers.items()})
