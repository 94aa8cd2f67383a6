"""The learning rate of a step, as a function of the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# From the finished part of the decay, 0 to 1, to the remaining part of the way to the final rate.
DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda over: 1.0,
        "linear": lambda over: 1.0 - over,
        "cosine": lambda over: (1.0 + math.cos(math.pi * over)) / 2.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """A linear rise to `peak` over `warm_up_steps`, then a decay to `final`, reached after `decay_steps`.

    The decay's steps include the warm-up. Cosine: Loshchilov and Hutter, arXiv 1608.03983, without restarts.
    """

    name: str
    peak: float
    final: float
    warm_up_steps: int
    decay_steps: int

    def rate(self, step: int) -> float:
        """Return the rate of step number `step`, from 0."""
        if step < self.warm_up_steps:
            return self.peak * ((step + 1) / self.warm_up_steps)
        length = self.decay_steps - self.warm_up_steps
        over = min(1.0, (step - self.warm_up_steps) / length) if length > 0 else 1.0
        return self.final + (self.peak - self.final) * DECAYS[self.name](over)
