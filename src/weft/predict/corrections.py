"""Residuals of measured plans against predictions, and the correction fitted to them.

A residual is log(measured / predicted). It has a part shared by all plans of one model on one machine, and
the plan's own part. Before any measurement, the declared 90 % interval gives the variance, and `SHARED` of it
is shared. Residuals of plans give a posterior (Gelman et al., Bayesian Data Analysis, 3rd edition). The
shared part is their median, shrunk towards 0 by a normal prior with a normal likelihood (section 2.5). The
own variance is a scaled inverse chi-squared (section 2.6); its prior counts as `PRIOR` residuals. The prior
of the shared variance counts as much. This variance grows where the median is far outside the declared
interval. It never falls, because one shared part says little about it. A plan may be measured while the
machine does something else. So median and median absolute deviation replace mean and variance. Factors from
Croux and Rousseeuw (COMPSTAT 1992) make the deviation unbiased for few values.

Peaks of memory are corrected alike, by one factor for all parts. Their residual is the median over a plan's
ranks, and their declared interval is that of the prediction.

Instructions are measured one by one. So computations, messages and collectives have corrections of their own
from `LEAST` measurements on. The correction of the remaining error of the whole step applies to all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weft.describe.prediction import END_OF_INTERVAL, SHARED
from weft.describe.units import counted
from weft.errors import InputError, Violation

# The declared own spread counts as this many residuals; with fewer its mean would be undefined.
PRIOR = 3
# A median of fewer values does not protect against an outlier.
LEAST = 3
# A machine drifts: only this many of the newest measurements count.
MOST = 64

_DEVIATIONS_OF_NORMAL = 1.4826
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}

PartKind = Literal["computations", "messages", "collectives"]
Key = tuple[PartKind, str]
"""A kind of part, and the device of computations, else an empty name."""

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
_PositiveCount = Annotated[int, Field(gt=0)]


class _CorrectionRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_CorrectionRecord):
    """The contribution of one kind of instruction to a step.

    `share` is its part of the predicted step. If the instructions take 1 % longer, the step grows by `share`
    per cent. `ratio` is measured over predicted time; None if none was measured, or not separately.
    """

    kind: PartKind
    device: str = ""
    share: float = Field(ge=0.0, le=1.0)
    ratio: _Positive | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.device


class Peaks(_CorrectionRecord):
    """The peaks of memory of a plan's ranks, predicted without any correction, and measured.

    `half_width` is the relative half-width of the declared 90 % interval of the fullest rank.
    """

    predicted_bytes: tuple[_PositiveCount, ...] = Field(min_length=1)
    measured_bytes: tuple[_PositiveCount, ...] = Field(min_length=1)
    half_width: float = Field(gt=0.0, lt=1.0)

    @property
    def residual(self) -> float:
        """The median over ranks of log(measured / predicted)."""
        pairs = zip(self.measured_bytes, self.predicted_bytes, strict=True)
        return median(math.log(measured / predicted) for measured, predicted in pairs)

    @property
    def declared_spread(self) -> float:
        """Standard deviation of the residual, as the declared interval implies it."""
        return spread_of(1.0 - self.half_width, 1.0 + self.half_width)

    @model_validator(mode="after")
    def _of_the_same_ranks(self) -> Peaks:
        if len(self.predicted_bytes) != len(self.measured_bytes):
            counts = f"{len(self.measured_bytes)} peaks for {len(self.predicted_bytes)} ranks"
            raise InputError(Violation("measured_bytes", counts))
        return self


class Observation(_CorrectionRecord):
    """A plan's step, predicted without any correction, and measured.

    `sources` gives the source of the times for each kind of device. `half_width` is the relative half-width
    of the declared 90 % interval. `time_s` is the time of the measurement, in seconds since 1970.
    """

    plan_id: str
    time_s: float = Field(ge=0.0, allow_inf_nan=False)
    sources: Mapping[str, str]
    half_width: float = Field(gt=0.0, lt=1.0)
    predicted_step_s: _Positive
    measured_step_s: _Positive
    parts: tuple[Part, ...] = ()
    peaks: Peaks | None = None

    @property
    def declared_spread(self) -> float:
        """Standard deviation of the residual, as the declared interval implies it."""
        return spread_of(1.0 - self.half_width, 1.0 + self.half_width)

    def scaled_step_s(self, factors: Mapping[Key, float]) -> float:
        """Return the predicted step with the parts' times scaled by `factors`, if the critical path stays."""
        more = sum(part.share * (factors.get(part.key, 1.0) - 1.0) for part in self.parts)
        return self.predicted_step_s * (1.0 + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """The expected logarithm of the next ratio after some residuals, and the variances around it."""

    log_ratio: float
    shared_variance: float
    own_variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCorrection:
    """The factor of predicted peaks of memory, and the remaining uncertainty.

    Attributes:
        count: the number of runs behind it; 0 without any.
        factor: of all bytes.
        widening: of the relative half-width of the declared 90 % interval.
    """

    count: int = 0
    factor: float = 1.0
    widening: float = 1.0

    def in_words(self) -> str:
        """Return the words for the source of a peak."""
        return f"measured in {counted(self.count, 'run')}"


UNMEASURED_MEMORY = MemoryCorrection()


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors for predictions of one model on one machine, and the remaining uncertainty.

    Attributes:
        sources: the source of the corrected times, by kind of device.
        count: the number of measurements behind it.
        factors: of each part's time. step: of all times, in addition.
        shared_variance, own_variance: of the remaining residuals; all plans share the first.
        declared_spread: standard deviation of the residuals before any measurement.
        memory: of peaks of memory.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    factors: Mapping[Key, float] = field(default_factory=dict)
    step: float = 1.0
    shared_variance: float = 0.0
    own_variance: float = 0.0
    declared_spread: float = 0.0
    memory: MemoryCorrection = UNMEASURED_MEMORY

    def computations(self, device: str) -> float:
        """Return the factor of the time of a device's computations."""
        return self.factors.get(("computations", device), 1.0) * self.step

    @property
    def messages(self) -> float:
        """Factor of the time of messages."""
        return self.factors.get(("messages", ""), 1.0) * self.step

    @property
    def collectives(self) -> float:
        """Factor of the time of collectives."""
        return self.factors.get(("collectives", ""), 1.0) * self.step

    @cached_property
    def shared(self) -> float:
        """Share of the variance that is common to all plans: the correlation of any two of them."""
        variance = self.shared_variance + self.own_variance
        return self.shared_variance / variance if variance > 0.0 else SHARED

    def interval(self, low_scale: float, high_scale: float) -> tuple[float, float]:
        """Return the ends of the 90 % interval over the corrected step, for a plan with these declared ends.

        The interval is at least as wide as that of the measured plans, and wider for a wider declaration.
        """
        spread = math.sqrt(self.shared_variance + self.own_variance)
        if self.declared_spread > 0.0:
            spread *= max(1.0, spread_of(low_scale, high_scale) / self.declared_spread)
        return math.exp(-END_OF_INTERVAL * spread), math.exp(END_OF_INTERVAL * spread)

    def covers(self, sources: Mapping[str, str]) -> bool:
        """Return True if the correction was fitted for all these kinds of devices and their sources."""
        return sources.items() <= self.sources.items()

    def in_words(self) -> str:
        """Return the words for a prediction's source."""
        return f"corrected by {count_text(self.count)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A measured plan and its prediction, with interval, by the correction fitted to all other plans."""

    observation: Observation
    step_s: float
    low_s: float
    high_s: float

    @property
    def inside(self) -> bool:
        return self.low_s <= self.observation.measured_step_s <= self.high_s


def spread_of(low_scale: float, high_scale: float) -> float:
    """Return the standard deviation of a logarithm from the ends, above 0, of its 90 % interval."""
    return math.log(high_scale / low_scale) / (2.0 * END_OF_INTERVAL)


def posterior(residuals: Sequence[float], declared_spread: float) -> Posterior:
    """Return the posterior of the next residual; `declared_spread`, above 0, is the prior deviation."""
    shared_variance = SHARED * declared_spread**2
    own_variance = (1.0 - SHARED) * declared_spread**2
    count = len(residuals)
    if not count:
        return Posterior(log_ratio=0.0, shared_variance=shared_variance, own_variance=own_variance)
    middle = median(residuals)
    found = _deviation(residuals, middle) ** 2
    freedom = PRIOR + count - 1
    own_variance = (PRIOR * own_variance + (count - 1) * found) / (freedom - 2)
    # A median's variance is pi/2 times that of a mean.
    error_variance = math.pi / 2.0 * own_variance / count
    seen = middle**2 - error_variance
    shared_variance = max(shared_variance, (PRIOR * shared_variance + seen) / (PRIOR + 1))
    weight = shared_variance / (shared_variance + error_variance)
    return Posterior(
        log_ratio=weight * middle, shared_variance=shared_variance * (1.0 - weight), own_variance=own_variance
    )


def fit(observations: Sequence[Observation]) -> Correction | None:
    """Return the correction from plans of the same model, machine and sources; None without observations.

    The order of the observations does not matter.
    """
    if not observations:
        return None
    spread = median(one.declared_spread for one in observations)
    residuals: dict[Key, list[float]] = defaultdict(list)
    for one in observations:
        for part in one.parts:
            if part.ratio is not None:
                residuals[part.key].append(math.log(part.ratio))
    factors = {
        key: math.exp(posterior(some, spread).log_ratio)
        for key, some in sorted(residuals.items())
        if len(some) >= LEAST
    }
    left = posterior(
        [math.log(one.measured_step_s / one.scaled_step_s(factors)) for one in observations], spread
    )
    return Correction(
        sources=observations[0].sources,
        count=len(observations),
        factors=factors,
        step=math.exp(left.log_ratio),
        shared_variance=left.shared_variance,
        own_variance=left.own_variance,
        declared_spread=spread,
        memory=_fit_memory([one.peaks for one in observations if one.peaks is not None]),
    )


def _fit_memory(peaks: Sequence[Peaks]) -> MemoryCorrection:
    if not peaks:
        return UNMEASURED_MEMORY
    declared_spread = median(one.declared_spread for one in peaks)
    found = posterior([one.residual for one in peaks], declared_spread)
    return MemoryCorrection(
        count=len(peaks),
        factor=math.exp(found.log_ratio),
        widening=math.sqrt(found.shared_variance + found.own_variance) / declared_spread,
    )


def left_out(observations: Sequence[Observation]) -> tuple[LeftOut, ...]:
    """Return each measured plan as the others predict it: the accuracy for a plan without a measurement.

    A plan without others keeps its prediction, with the declared interval.
    """
    found = []
    for one in observations:
        others = fit([other for other in observations if other.plan_id != one.plan_id])
        step_s, ends = one.predicted_step_s, (1.0 - one.half_width, 1.0 + one.half_width)
        if others is not None:
            step_s, ends = one.scaled_step_s(others.factors) * others.step, others.interval(*ends)
        low_s, high_s = (step_s * end for end in ends)
        found.append(LeftOut(observation=one, step_s=step_s, low_s=low_s, high_s=high_s))
    return tuple(found)


def newest(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the last `MOST` distinct measurements, rising in time."""
    ordered = sorted(observations, key=lambda one: (one.time_s, one.model_dump_json()))
    once = {(one.plan_id, one.time_s, tuple(sorted(one.sources.items()))): one for one in ordered}
    return tuple(once.values())[-MOST:]


def count_text(count: int) -> str:
    """Return the count of measurements in words."""
    return counted(count, "measurement")


def _deviation(values: Sequence[float], middle: float) -> float:
    """Return the standard deviation of normal values, estimated from their median absolute deviation."""
    count = len(values)
    if count < 2:
        return 0.0
    few = _SMALL_SAMPLE.get(count, count / (count - 0.8))
    return few * _DEVIATIONS_OF_NORMAL * median(abs(value - middle) for value in values)
