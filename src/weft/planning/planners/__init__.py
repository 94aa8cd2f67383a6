"""Planners by name. A new planner is one file here and one line in `PLANNERS`.

A planner of another package is a class that its entry point in the group `weft.planners` names.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import require_choice
from weft.installed import with_installed
from weft.planning.placement.placers import PLACERS
from weft.planning.planners.amp import AmpPlanner
from weft.planning.planners.annealing import AnnealingPlanner
from weft.planning.planners.baechi import BAECHI_PLANNER, PlacementPlanner
from weft.planning.planners.base import Candidate, Planner, Ranking, Verdict
from weft.planning.planners.checked import CheckedPlanner
from weft.planning.planners.equal_split import EqualSplitPlanner
from weft.planning.planners.graphpipe import GraphPipePlanner
from weft.planning.planners.homogeneous import (
    ExhaustivePlanner,
    HomogeneousPlanner,
    RandomPlanner,
    UniformPlanner,
)
from weft.planning.planners.megatron import MegatronPlanner
from weft.planning.planners.metis_form import MetisFormPlanner
from weft.planning.planners.pipedream import PipeDreamPlanner
from weft.planning.planners.piper import PiperPlanner
from weft.planning.planners.weft import WeftPlanner

_ALL: tuple[Planner, ...] = (
    WeftPlanner(),
    HomogeneousPlanner(),
    AmpPlanner(),
    GraphPipePlanner(),
    PipeDreamPlanner(),
    PiperPlanner(),
    EqualSplitPlanner(),
    BAECHI_PLANNER,
    # `exact` places few operators, fewer than most models have.
    *(PlacementPlanner(name=name, placers=(name,)) for name in PLACERS if name != "exact"),
    MegatronPlanner(),
    UniformPlanner(),
    MetisFormPlanner(),
    AnnealingPlanner(),
    RandomPlanner(),
    ExhaustivePlanner(),
)
_MEMBERS = ("name", "space", "search")
PLANNERS: Mapping[str, Planner] = {planner.name: planner for planner in _ALL}


def all_planners() -> Mapping[str, Planner]:
    """Return every known planner by name, weft's own first.

    Raises:
        InputError: when two planners share a name, or an installed one lacks a member.
    """
    return with_installed("planner", PLANNERS, _MEMBERS, CheckedPlanner)


def get_planner(name: str) -> Planner:
    """Return the planner of this name.

    Raises:
        InputError: when no planner has it.
    """
    if name in PLANNERS:
        return PLANNERS[name]
    known = all_planners()
    require_choice("planner", name, known)
    return known[name]


__all__ = ["PLANNERS", "Candidate", "Planner", "Ranking", "Verdict", "all_planners", "get_planner"]
