"""`Prediction`: the expected step of a plan. It is separate from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes, format_seconds

# Default share of the variance of a prediction's error that all plans of one model on one machine have in
# common; measurements replace it.
SHARED = 0.9
# Standard deviations from the middle of a normal distribution to an end of its 90 % interval.
END_OF_INTERVAL = NormalDist().inv_cdf(0.95)


def margin_at(risk: float) -> float:
    """Return the half-widths of a 90 % interval that a normal value exceeds with this probability."""
    return NormalDist().inv_cdf(1.0 - risk) / END_OF_INTERVAL


def chance_to_fit(peak_bytes: float, high_bytes: float, usable_bytes: float) -> float:
    """Return the probability that a peak with this upper end of its 90 % interval fits into memory."""
    if high_bytes <= peak_bytes:
        return float(peak_bytes <= usable_bytes)
    return NormalDist(peak_bytes, (high_bytes - peak_bytes) / END_OF_INTERVAL).cdf(usable_bytes)


class Prediction(BaseModel):
    """The planner's expectation of a step: seconds with a 90 % interval, and each rank's peak bytes.

    `shared` is the part of the variance of the logarithm of the step's error common to the job's plans.
    `peak_high_bytes` are the upper ends of the peaks' 90 % intervals. They are empty in files of earlier
    versions, where peaks count as exact.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float = Field(gt=0)
    step_low_s: float = Field(gt=0)
    step_high_s: float = Field(gt=0)
    first_step_s: float = Field(gt=0)
    peak_bytes: tuple[int, ...]
    peak_high_bytes: tuple[int, ...] = ()
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
    def _high_bytes(self) -> tuple[int, ...]:
        return self.peak_high_bytes or self.peak_bytes

    def peaks_at(self, risk: float) -> list[int]:
        """Return the bytes that each rank's peak exceeds with the probability `risk`."""
        margin, pairs = margin_at(risk), zip(self.peak_bytes, self._high_bytes, strict=True)
        return [round(peak + margin * (high - peak)) for peak, high in pairs]

    def chance_to_fit(self, usable_bytes: Sequence[int]) -> float:
        """Return the probability that the peaks of all ranks fit into this memory.

        The ranks err alike, since their peaks come from one model. So the tightest rank decides.
        """
        ranks = set(zip(self.peak_bytes, self._high_bytes, usable_bytes, strict=False))
        return min((chance_to_fit(*rank) for rank in ranks), default=1.0)
