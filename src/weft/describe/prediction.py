"""`Prediction`: the expected step of a plan. It is separate from the plan."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes, format_seconds

# Default share of the variance of a prediction's error that all plans of one model on one machine have in
# common; measurements replace it.
SHARED = 0.9


class Prediction(BaseModel):
    """The planner's expectation of a step: seconds with a 90 % interval, and each rank's peak bytes.

    `shared` is the part of the variance of the logarithm of the step's error common to the job's plans.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float = Field(gt=0)
    step_low_s: float = Field(gt=0)
    step_high_s: float = Field(gt=0)
    first_step_s: float = Field(gt=0)
    peak_bytes: tuple[int, ...]
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
