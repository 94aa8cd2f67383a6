"""`NothingFitsError`: no layout of a job fits, with the closest ones and what would make them fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from weft.describe.units import counted, format_seconds
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

    It names the closest one for each reason, and the one notch that makes it fit.
    """
    if not ranking.candidates:
        asked = ranking.problem
        pinned = asked.pins.given | ({} if asked.sync is None else {"sync": asked.sync})
        words = pins_words(pinned)
        cluster = asked.job.cluster
        devices = (
            f"{counted(cluster.ranks, 'device')} in nodes of {max(group.devices for group in cluster.groups)}"
        )
        servers = asked.job.servers
        if servers:
            leave = f"{counted(servers, 'server')} {'leaves' if servers == 1 else 'leave'}"
            left = f"{leave} {max(cluster.ranks - servers, 0)} for stages"
            words = f"{words} ({left})"
        problem = f"no layout of all {devices} has {words}; degrees must divide the devices"
        if servers or {"pp", "dp"} <= pinned.keys():
            return NothingFitsError(ranking, [Violation("plan", problem)])
        # With both, devices may stay idle.
        left_open = " and ".join(f"{axis} 1" for axis in ("pp", "dp") if axis not in pinned)
        problem += ", or pp and dp be pinned"
        return NothingFitsError(
            ranking, [Violation("plan", problem, f"{left_open}, which leaves devices idle")]
        )
    changes = SmallestChanges(ranking.problem, ranking.candidates)
    ranks = ranking.problem.job.cluster.ranks
    # Layouts of more ranks are close to nothing, unless there are no others.
    near = [one for one in ranking.closest if one.layout is None or one.layout.ranks <= ranks]
    by_reason: dict[str, Candidate] = {}
    for one in near or ranking.closest:
        by_reason.setdefault(one.reason, one)
    closest = [
        Violation(f"no layout fits; closest: {one.words}", reason + _remedy(one, changes))
        for reason, one in islice(by_reason.items(), REASONS_SHOWN)
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
