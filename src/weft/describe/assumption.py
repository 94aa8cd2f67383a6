"""`Assumption`: what predictions take for granted where a job leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.bundles import parts
from weft.describe.job import Job


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption of a method about jobs; the method contributes it.

    Attributes:
        key: its name among assumptions.
        words: returns what is assumed of a job; None if nothing is, or if the job states it.
    """

    key: str
    words: Callable[[Job], str | None]


def assumed_of(job: Job) -> Mapping[str, str]:
    """Return what methods assume of a job, in words by key."""
    return {one.key: words for one in parts(Assumption) if (words := one.words(job)) is not None}
