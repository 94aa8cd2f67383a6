"""`NothingFitsError`: no layout of a job fits, with the closest ones and what would make them fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.describe.units import format_seconds
from weft.errors import InputError, Violation
from weft.planning.advice import SmallestChanges
from weft.planning.planners import Candidate, Ranking

REASONS_SHOWN = 3


class NothingFitsError(InputError):
    """No layout fits; `ranking` has those that were considered."""

    def __init__(self, ranking: Ranking, violations: Sequence[Violation]) -> None:
        super().__init__(violations)
        self.ranking = ranking


def nothing_fits(ranking: Ranking) -> NothingFitsError:
    """Return the error of a ranking without a fitting layout.

    It names the closest ones, and the one notch that makes each of them fit.
    """
    if not ranking.candidates:
        asked = ranking.problem
        pinned = asked.pins.given | ({} if asked.sync is None else {"sync": asked.sync})
        words = pins_words(pinned)
        cluster = asked.job.cluster
        devices = f"{cluster.ranks} devices in nodes of {max(group.devices for group in cluster.groups)}"
        problem = f"no layout of {devices} has {words}; degrees must divide the devices"
        return NothingFitsError(ranking, [Violation("plan", problem)])
    changes = SmallestChanges(ranking.problem, ranking.candidates)
    # The first of each reason: the same again says nothing new.
    each = {one.reason: one for one in reversed(ranking.closest)}
    closest = [
        Violation(f"no layout fits; closest: {one.words}", one.reason + _remedy(one, changes))
        for one in list(reversed(each.values()))[:REASONS_SHOWN]
    ]
    return NothingFitsError(ranking, closest)


def pins_words(pinned: Mapping[str, object]) -> str:
    """Return decisions by name in words, such as ``pp 2, recompute none``."""
    return ", ".join(f"{name.replace('_', ' ')} {_pinned(value)}" for name, value in pinned.items())


def _pinned(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _remedy(candidate: Candidate, changes: SmallestChanges) -> str:
    """Return the one notch that would make it fit against the user's pins, if there is one, in words."""
    change = changes.of_candidate(candidate)
    return "" if change is None else f"; fits with {change.words}: a step of {format_seconds(change.step_s)}"
