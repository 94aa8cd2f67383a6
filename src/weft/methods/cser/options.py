"""The options of CSER (Xie et al., arXiv 2007.13221), and the ratios and interval that follow from them."""

from __future__ import annotations

from math import inf, log2
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from weft.describe.synchronisation import StepsApart
from weft.describe.toml_table import Count
from weft.errors import InputError, Violation
from weft.methods.cser.absences import Absences, absences_in, first_problem

NAME = "cser"
# The squared distance of replicas from their mean, weighted by their shares and scaled from the met blocks to
# all; and steps since the last meeting of the block that waits longest, the mean over ranks.
DISAGREEMENT, STALEST = "squared_disagreement", "stalest_block_steps"
# The event of replicas that leave or come back, and its key of those that come back.
ABSENCES, RETURNED = "absences", "returned"
Ratio = Annotated[float, Field(ge=1)]
# Keys that say how much replicas send.
_RATIOS = ("ratio", "update_ratio", "reset_ratio", "every")
# How far a ratio may be from that of the other keys.
_TOLERANCE = 1e-6


class Ratios(NamedTuple):
    """Numbers of all weights over those that meetings average.

    Attributes:
        update: of each step; None: steps send nothing.
        reset: of each reset; None: there are no resets.
        every: steps between two resets.
    """

    update: float | None = None
    reset: float | None = None
    every: int = 1

    @property
    def largest(self) -> float:
        return max(self.update or 1.0, self.reset or 1.0)


class CserOptions(StepsApart):
    """The further keys of `[sync]` under `method = "cser"`."""

    variant: Literal["paper", "code", "error-feedback"] = Field(
        default="paper",
        description="paper: average a part of the update in each step, and of the error at resets; code: a "
        "part of the weights in each step; error-feedback: equal weights, and errors that wait",
    )
    compressor: Literal["blocks", "top-k", "sign"] = Field(
        default="blocks", description="the parts that replicas send: common random blocks, or their own"
    )
    ratio: Ratio | None = Field(
        default=None, description="all weights over the numbers sent in a mean step; decides the keys below"
    )
    update_ratio: Ratio | None = Field(
        default=None, description="all weights over those averaged in a step; none: steps send nothing"
    )
    reset_ratio: Ratio | None = Field(default=None, description="all weights over those averaged at a reset")
    every: Count | None = Field(default=None, description="steps between two resets")
    order: Literal["random", "shuffled"] = Field(
        default="random", description="shuffled: take all blocks in one drawn order, again and again"
    )
    block: Count | None = Field(default=None, description="weights in a block; none: by the ratios, to 4096")
    keep_errors: bool = Field(
        default=False, description="whether each rank keeps its error apart, which blocks do not need"
    )
    absent: str = Field(
        default="",
        description='the resets that replicas miss, counted from 0, such as "2: 4-6"; each comes back by the '
        "next reset",
    )
    rounds: Count | None = Field(default=None, description="resets after which absences come again")

    @property
    def explicit(self) -> bool:
        """True if ranks keep an error for every weight."""
        return self.keep_errors or self.compressor != "blocks" or self.variant == "error-feedback"

    @property
    def ratios(self) -> Ratios:
        """The ratios and the interval, given or by the budget rule: half of the numbers for resets."""
        if self.compressor == "sign":
            resets = self.variant == "paper"
            return Ratios(1.0, 1.0 if resets else None, self.every or 1)
        if self.variant == "error-feedback":
            return Ratios(self.update_ratio or self.ratio)
        if self.ratio is None:
            return Ratios(self.update_ratio, self.reset_ratio, self.every or 1)
        return _solved(self.ratio, self.update_ratio, self.reset_ratio, self.every)

    @property
    def absences(self) -> Absences:
        """The absences of replicas."""
        return Absences(self.ratios.every, self.rounds or 1, tuple(absences_in(self.absent)))

    @property
    def steps_apart(self) -> int | None:
        return None if self.ratios.reset is None else self.ratios.every

    def taken(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        return self.absences.taken(replicas) if self.absent else ((0,),) * replicas

    @model_validator(mode="after")
    def _consistent(self) -> CserOptions:
        if problems := [*_needless(self), *_missing(self), *_away(self)]:
            raise InputError(problems[:1])
        ratios = self.ratios
        if self.ratio is not None and self.variant != "error-feedback":
            sent = 1.0 / (ratios.update or inf) + 1.0 / ((ratios.reset or 1.0) * ratios.every)
            low = ratios.update is not None and ratios.update < 1.0
            if low or (ratios.reset or 1.0) < 1.0 or abs(sent * self.ratio - 1.0) > _TOLERANCE:
                problem = f"{self.ratio:g}: the other keys send more or less than this ratio"
                raise InputError(Violation("ratio", problem))
        return self


def _needless(options: CserOptions) -> list[Violation]:
    """Return violations of keys that the chosen variant or compressor has no use for."""

    def named(keys: tuple[str, ...], why: str) -> list[Violation]:
        fields = type(options).model_fields
        given = [key for key in keys if getattr(options, key) != fields[key].default]
        return [Violation(key, f"{why}; leave it out") for key in given]

    found = []
    if options.compressor != "blocks":
        found += named(("order", "block", "keep_errors"), f"{options.compressor} has no blocks")
        if options.variant == "code":
            problem = "variant 'code' averages weights, and only blocks of them are the same on all replicas"
            found.append(Violation("compressor", problem, "blocks"))
    if options.compressor == "sign":
        found += named(_RATIOS[:3], "signs have one bit for each weight")
    if options.variant == "code":
        found += named(("keep_errors",), "variant 'code' has no errors")
    if options.variant == "error-feedback":
        found += named(("reset_ratio", "every", "keep_errors"), "error feedback has no resets")
        if options.ratio is not None:
            found += named(("update_ratio",), "error feedback has one ratio, and ratio gives it")
    return found


def _missing(options: CserOptions) -> list[Violation]:
    """Return violations of keys that nothing stands for."""
    given = [key for key in _RATIOS if getattr(options, key) is not None]
    if options.compressor == "sign":
        resets = options.variant == "paper" and options.every is None
        return [Violation("every", "missing; it is the steps between two resets")] if resets else []
    if options.variant == "error-feedback":
        return [] if given else [Violation("ratio", "missing")]
    if not given:
        return [Violation("ratio", "missing; or give update_ratio, reset_ratio and every")]
    lost = [key for key in ("reset_ratio", "every") if key not in given]
    if options.ratio is None and lost:
        return [Violation(lost[0], "missing; without resets replicas drift apart")]
    return []


def _away(options: CserOptions) -> list[Violation]:
    """Return violations of absences, whatever the number of replicas."""
    if not options.absent:
        named = options.rounds is not None
        return [Violation("rounds", "no replica is absent; leave it out")] if named else []
    if options.variant != "paper" or not options.explicit:
        problem = "a replica that comes back brings its error, and none is kept"
        if options.variant == "paper":
            return [Violation("keep_errors", problem, "true")]
        return [Violation("absent", f"variant {options.variant!r}: {problem}; leave it out")]
    if options.rounds is None:
        return [Violation("rounds", "missing; it is the resets after which absences come again")]
    try:
        missed = absences_in(options.absent)
    except ValueError as error:
        problem = f"{error}: names no replica and the resets that it misses"
        return [Violation("absent", problem, "2: 4-6")]
    found = first_problem(missed, options.rounds)
    return [] if found is None else [Violation("absent", found)]


def _solved(ratio: float, update: float | None, reset: float | None, every: int | None) -> Ratios:
    """Return ratios with `1 / ratio = 1 / update + 1 / (reset every)`, as far as the given keys leave room.

    Steps and resets send half of the numbers each unless a key says otherwise. Then `every` is
    `update / reset`, as in all experiments of the paper.
    """
    rest = 1.0 / ratio - 1.0 / update if update is not None else 0.5 / ratio
    if rest <= 0.0:
        return Ratios(update, reset or 1.0, every or 1)
    between = 1.0 / rest
    if reset is None and every is None:
        # The paper has 4, 16 and 8 for totals of 32, 256 and 1024; this rule 4, 8 and 16.
        every = max(round(between / 2.0 ** round(log2(between) / 3.0)), 1)
    if every is None:
        assert reset is not None, "one of the two is given"
        every = max(round(between / reset), 1)
    if reset is None:
        reset = max(between / every, 1.0)
    left = 1.0 / ratio - 1.0 / (reset * every)
    if update is None and left > _TOLERANCE / ratio:
        update = 1.0 / left
    return Ratios(update, reset, every)
