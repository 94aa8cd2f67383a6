"""`Prediction`: what is expected of a plan's step. It stands beside the plan and is no part of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.one_line import one_line
from weft.describe.units import format_bytes, format_seconds

# Share of the variance of a prediction's error that all plans of one model on one machine have in common, as
# long as nobody has measured it.
SHARED = 0.9


class Prediction(BaseModel):
    """What the planner expected; times with a 90 % interval.

    `shared` is the part of the variance of the step's error (of its logarithm) that other plans of the job
    have in common with it.
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
        interval = f"{format_seconds(self.step_low_s)} - {format_seconds(self.step_high_s)}"
        peak = format_bytes(max(self.peak_bytes, default=0))
        return one_line(
            self, f"step {format_seconds(self.step_s)} ({interval}), largest peak {peak}, from {self.source}"
        )

    def __str__(self) -> str:
        return repr(self)
