"""What measured steps say of predictions: residuals of plans, and the correction that is fitted to them.

A residual is the logarithm of measured over predicted. It has a part that all plans of one model on one
machine share, and one that is the plan's own. Before anything is measured both have the variances that the
declared 90 % interval stands for, `SHARED` of it shared. Residuals of plans turn that into a posterior: the
shared part is their median, shrunk towards 0 as a normal prior with a normal likelihood shrinks it (Gelman
et al., Bayesian Data Analysis, 3rd edition, section 2.5), and the own variance is a scaled inverse
chi-squared (section 2.6) whose prior counts as `PRIOR` residuals. So does the shared variance's, which one
shared part tells little of: it grows where the median is far outside of what was declared, and never falls.
Median and median absolute deviation take the place of mean and variance, because a plan may be measured while
the machine does something else; the factors that make the deviation unbiased for few values are those of
Croux and Rousseeuw (COMPSTAT 1992).

Instructions are measured one by one, so computations, messages and collectives have corrections of their own,
as soon as there are `LEAST` of them; what these leave of the whole step is shared out over all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist, median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.prediction import SHARED

# The declared own spread counts as much as this many residuals; with fewer its mean would be undefined.
PRIOR = 3
# A median of fewer values is no protection against one that went wrong.
LEAST = 3
# A machine drifts: only so many of the newest measurements count.
MOST = 64
END_OF_INTERVAL = NormalDist().inv_cdf(0.95)

_DEVIATIONS_OF_NORMAL = 1.4826
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}

PartKind = Literal["computations", "messages", "collectives"]
Key = tuple[PartKind, str]
"""A kind of part, and the device for computations, else an empty name."""

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _CorrectionRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_CorrectionRecord):
    """What one kind of instruction had to do with a step.

    `share` is the part of the predicted step that it makes: by how many per cent the step grows for each per
    cent that the instructions take longer. `ratio` is their measured over their predicted time; None where
    none of them was measured, or not by itself.
    """

    kind: PartKind
    device: str = ""
    share: float = Field(ge=0.0, le=1.0)
    ratio: _Positive | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.device


class Observation(_CorrectionRecord):
    """A plan's step: predicted without any correction, and measured.

    `sources` says for each kind of device what its times came from; `half_width` is the relative half-width
    of the declared 90 % interval; `time_s` is when it was measured, in seconds since 1970.
    """

    plan_id: str
    time_s: float = Field(ge=0.0, allow_inf_nan=False)
    sources: Mapping[str, str]
    half_width: float = Field(gt=0.0, lt=1.0)
    predicted_step_s: _Positive
    measured_step_s: _Positive
    parts: tuple[Part, ...] = ()

    @property
    def declared_spread(self) -> float:
        """Standard deviation of the residual that the declared interval stands for."""
        return spread_of(1.0 - self.half_width, 1.0 + self.half_width)

    def scaled_step_s(self, factors: Mapping[Key, float]) -> float:
        """The predicted step after each part takes its factor longer, as long as the critical path stays."""
        more = sum(part.share * (factors.get(part.key, 1.0) - 1.0) for part in self.parts)
        return self.predicted_step_s * (1.0 + more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What residuals say of the next one: the logarithm expected of it, and the variances around that."""

    log_ratio: float
    shared_variance: float
    own_variance: float


@dataclass(frozen=True, kw_only=True)
class Correction:
    """By what predictions of one model on one machine are multiplied, and how sure they are then.

    Attributes:
        sources: for each kind of device, what the times that are corrected come from.
        count: how many measurements stand behind it.
        factors: of each part's time. step: of all times on top of that.
        shared_variance, own_variance: of the residuals that are left; all plans share the first one.
        declared_spread: standard deviation of the residuals before anything was measured.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    factors: Mapping[Key, float] = field(default_factory=dict)
    step: float = 1.0
    shared_variance: float = 0.0
    own_variance: float = 0.0
    declared_spread: float = 0.0

    def computations(self, device: str) -> float:
        """Factor of the time of a device's computations."""
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
        """Share of the variance that is common to all plans, which is the correlation of any two."""
        variance = self.shared_variance + self.own_variance
        return self.shared_variance / variance if variance > 0.0 else SHARED

    def interval(self, low_scale: float, high_scale: float) -> tuple[float, float]:
        """Ends of the 90 % interval over the corrected step, for a plan with these declared ends.

        What is declared to be surer than the measured plans is not, what is less sure stays so.
        """
        spread = math.sqrt(self.shared_variance + self.own_variance)
        if self.declared_spread > 0.0:
            spread *= max(1.0, spread_of(low_scale, high_scale) / self.declared_spread)
        return math.exp(-END_OF_INTERVAL * spread), math.exp(END_OF_INTERVAL * spread)

    def covers(self, sources: Mapping[str, str]) -> bool:
        """Return whether it was learned for all these kinds of devices and sources of their times."""
        return sources.items() <= self.sources.items()

    def in_words(self) -> str:
        """As a prediction's source says it."""
        return f"corrected by {count_text(self.count)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A measured plan, predicted with the correction that all other plans give, with its interval."""

    observation: Observation
    step_s: float
    low_s: float
    high_s: float

    @property
    def inside(self) -> bool:
        return self.low_s <= self.observation.measured_step_s <= self.high_s


def spread_of(low_scale: float, high_scale: float) -> float:
    """Standard deviation of the logarithm whose 90 % interval has these ends, both more than 0."""
    return math.log(high_scale / low_scale) / (2.0 * END_OF_INTERVAL)


def posterior(residuals: Sequence[float], declared_spread: float) -> Posterior:
    """What residuals say of the next one, given the standard deviation that was declared for it, above 0."""
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
        log_ratio=weight * middle,
        shared_variance=shared_variance * (1.0 - weight),
        own_variance=own_variance,
    )


def fit(observations: Sequence[Observation]) -> Correction | None:
    """The correction that plans of the same model, machine and sources give; None where there are none.

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
    )


def left_out(observations: Sequence[Observation]) -> tuple[LeftOut, ...]:
    """Return each measured plan as the others predict it, which is how well one is that nobody has measured.

    A plan without others has its prediction as it was, with the declared interval.
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
    """Return the last `MOST` measurements, each once, rising in time."""
    ordered = sorted(observations, key=lambda one: (one.time_s, one.model_dump_json()))
    once = {(one.plan_id, one.time_s, tuple(sorted(one.sources.items()))): one for one in ordered}
    return tuple(once.values())[-MOST:]


def count_text(count: int) -> str:
    """So many measurements, in words."""
    return f"{count} measurement{'s' if count != 1 else ''}"


def _deviation(values: Sequence[float], middle: float) -> float:
    """Return the standard deviation of normal values that have this median absolute deviation."""
    count = len(values)
    if count < 2:
        return 0.0
    few = _SMALL_SAMPLE.get(count, count / (count - 0.8))
    return few * _DEVIATIONS_OF_NORMAL * median(abs(value - middle) for value in values)
