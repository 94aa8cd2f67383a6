"""Incompatible methods, with reasons. Methods contribute them; all other combinations are allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.bundles import parts

if TYPE_CHECKING:
    from weft.describe.job import Job
    from weft.describe.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A method and another decision with which it is incompatible, always or in some layouts.

    Attributes:
        method, other: names for the table in the documentation.
        reason: the reason for the incompatibility, and its extent.
        refuse: returns the reason to refuse this layout of this job (given, nearest), or None.
    """

    method: str
    other: str
    reason: str
    refuse: Callable[[Job, Layout], str | None]


@dataclass(frozen=True, kw_only=True)
class ForwardFirst:
    """A method's need for orders in which a stage runs all forward passes before it goes back.

    `asks` returns True for jobs with this need.
    """

    asks: Callable[[Job], bool]


def goes_forward_first(job: Job) -> bool:
    """Return True if a method of the job needs all forward passes of a stage before its backward passes."""
    return any(one.asks(job) for one in parts(ForwardFirst))


@dataclass(frozen=True, kw_only=True)
class FixedCut:
    """A method's need for one cut of the chain of layers, because the job's mathematics depends on it.

    `layers_per_stage` returns the cut that a job needs; None for any.
    """

    layers_per_stage: Callable[[Job], tuple[int, ...] | None]


def fixed_cut(job: Job) -> tuple[int, ...] | None:
    """Return the layers of each stage that the methods of the job need; None for any."""
    cuts = (one.layers_per_stage(job) for one in parts(FixedCut))
    return next((cut for cut in cuts if cut is not None), None)


def refuse_composition(job: Job, layout: Layout) -> str | None:
    """Return the reason why the methods of a layout are incompatible, or None."""
    return next(
        (reason for one in parts(Composition) if (reason := one.refuse(job, layout)) is not None), None
    )
