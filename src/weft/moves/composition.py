"""How methods compose: what does not go together, and why. Methods contribute it; the rest goes together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.bundles import parts

if TYPE_CHECKING:
    from weft.describe.layout import Layout
    from weft.moves.job import Job


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A method beside another decision that it does not always go with.

    Attributes:
        method, other: names for the table of the documentation.
        reason: why they do not go together, as far as they do not.
        refuse: why this layout of this job is refused (given, nearest), or None.
    """

    method: str
    other: str
    reason: str
    refuse: Callable[[Job, Layout], str | None]


def refuse_composition(job: Job, layout: Layout) -> str | None:
    """Why the methods of a layout do not go together, or None."""
    return next(
        (reason for one in parts(Composition) if (reason := one.refuse(job, layout)) is not None), None
    )
