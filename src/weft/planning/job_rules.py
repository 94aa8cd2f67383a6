"""`JobRule`: what methods refuse of a planned job before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.bundles import parts
from weft.errors import Violation
from weft.planning.planned_job import PlannedJob


@dataclass(frozen=True, kw_only=True)
class JobRule:
    """A rule for a plan together with its run; a method contributes it."""

    refuse: Callable[[PlannedJob], Iterable[Violation]]


def refused_by_methods(job: PlannedJob) -> list[Violation]:
    """Return what methods refuse of a planned job."""
    return [problem for rule in parts(JobRule) for problem in rule.refuse(job)]
