"""`Prediction`: the expected step of a plan. It is separate from the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes, format_seconds

# Default share of the variance of a prediction's error that all plans of one model on one machine have in
# common; measurements replace it.
SHARED = 0.9
# Relative half-width of the 90 % interval of communicators' bytes; see `weft.predict.cost.communicators`.
COMMUNICATOR_SPREAD = 0.5
# Standard deviations from the middle of a normal distribution to an end of its 90 % interval.
END_OF_INTERVAL = NormalDist().inv_cdf(0.95)


def margin_at(risk: float) -> float:
    """Return the half-widths of a 90 % interval that a normal value exceeds with this probability."""
    return NormalDist().inv_cdf(1.0 - risk) / END_OF_INTERVAL


def chance_to_fit(peak_bytes: float, high_bytes: float, usable_bytes: float) -> float:
    """Return the probability that bytes with this upper end of their 90 % interval fit into memory."""
    if high_bytes <= peak_bytes:
        return float(peak_bytes <= usable_bytes)
    return NormalDist(peak_bytes, (high_bytes - peak_bytes) / END_OF_INTERVAL).cdf(usable_bytes)


class Prediction(BaseModel):
    """The planner's expectation of a step: seconds with a 90 % interval, and each rank's peak bytes.

    `shared` is the part of the variance of the logarithm of the step's error common to the job's plans.
    `peak_high_bytes` are the upper ends of the peaks' 90 % intervals. They are empty in files of earlier
    versions, where peaks count as exact. `communicator_bytes` lie beside the peaks; they are empty where no
    rank holds any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float = Field(gt=0)
    step_low_s: float = Field(gt=0)
    step_high_s: float = Field(gt=0)
    first_step_s: float = Field(gt=0)
    peak_bytes: tuple[int, ...]
    peak_high_bytes: tuple[int, ...] = ()
    communicator_bytes: tuple[int, ...] = ()
    source: str
    shared: float = Field(default=SHARED, ge=0.0, le=1.0)

    def __repr__(self) -> str:
        peak = format_bytes(max(self.peak_bytes, default=0))
        step = f"step {format_seconds(self.step_s)} ({self.interval})"
        return one_line(self, f"{step}, largest peak {peak}, from {self.source}")

    def __str__(self) -> str:
        return repr(self)

    @property
    def interval(self) -> str:
        """The 90 % interval in words."""
        return f"{format_seconds(self.step_low_s)} - {format_seconds(self.step_high_s)}"

    @property
    def step_record(self) -> dict[str, Any]:
        """The seconds of a step with their interval and source, for JSON."""
        return self.model_dump(include={"step_s", "step_low_s", "step_high_s", "source"})

    @property
    def needed_bytes(self) -> list[int]:
        """The bytes of each rank's peak and its communicators."""
        return [needed for needed, _ in self._needs]

    @property
    def _needs(self) -> Iterator[tuple[int, float]]:
        """The bytes that each rank needs, and the half-width of their 90 % interval.

        A peak's error says nothing of the communicators', which come from the topology that NCCL finds.
        """
        none = (0,) * len(self.peak_bytes)
        highs, besides = self.peak_high_bytes or self.peak_bytes, self.communicator_bytes or none
        for peak, high, beside in zip(self.peak_bytes, highs, besides, strict=True):
            half_width = high - peak
            yield peak + beside, math.hypot(half_width, COMMUNICATOR_SPREAD * beside)

    def needs_at(self, risk: float) -> list[int]:
        """Return the bytes that each rank's peak and communicators exceed with the probability `risk`."""
        margin = margin_at(risk)
        return [round(needed + margin * half_width) for needed, half_width in self._needs]

    def chance_to_fit(self, usable_bytes: Sequence[int]) -> float:
        """Return the probability that peaks and communicators of all ranks fit into this memory.

        The ranks err alike, since their peaks come from one model. So the tightest rank decides.
        """
        ranks = set(zip(self._needs, usable_bytes, strict=False))
        return min(
            (chance_to_fit(needed, needed + half, room) for (needed, half), room in ranks), default=1.0
        )
