"""The ways to place operators, by the names that users type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from weft.errors import require_choice
from weft.planning.placement.board import Placement
from weft.planning.placement.exact import exact
from weft.planning.placement.expert import expert
from weft.planning.placement.fastest import Placer, fastest, fastest_of_rules
from weft.planning.placement.favourites import favourites
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.heft import heterogeneous_earliest_finish
from weft.planning.placement.learned import learned
from weft.planning.placement.list_scheduler import earliest_task_first, small_communication_times
from weft.planning.placement.repair import repaired
from weft.planning.placement.topological import depth_first_order, round_robin, topological_fill
from weft.program.arrays import Ints


def _depth_first_fill(graph: OperatorGraph, devices: Devices) -> Ints:
    return topological_fill(graph, devices, depth_first_order(graph))


def _m_topo(graph: OperatorGraph, devices: Devices) -> Placement:
    """Walk in the published order and depth-first, and return the placement that ends first."""
    return fastest_of_rules([topological_fill, _depth_first_fill], graph, devices)


def _m_sct(graph: OperatorGraph, devices: Devices) -> Placement:
    return small_communication_times(graph, devices, favourites(graph, devices).children)


def _learned(graph: OperatorGraph, devices: Devices) -> Placement:
    return learned(graph, devices, evaluations=_evaluations(graph, 2000))


def _repair(graph: OperatorGraph, devices: Devices) -> Placement:
    """Repair the best placement of the fast placers."""
    placers = (_m_topo, earliest_task_first, _m_sct, heterogeneous_earliest_finish, expert)
    best = fastest(placers, graph, devices)
    *_, last = repaired(graph, devices, best, evaluations=_evaluations(graph, 500))
    return last.placement


def _evaluations(graph: OperatorGraph, most: int) -> int:
    """Return so many evaluations, or as many as place 400,000 operators together."""
    return min(most, 400_000 // max(graph.operators, 1))


def _exact(graph: OperatorGraph, devices: Devices) -> Placement:
    return exact(graph, devices).placement


# Baechi's three come first; the others are what to compare them with.
BAECHI = ("m-topo", "m-etf", "m-sct")
PLACERS: Mapping[str, Placer] = MappingProxyType(
    {
        "m-topo": _m_topo,
        "m-etf": earliest_task_first,
        "m-sct": _m_sct,
        "round-robin": partial(fastest_of_rules, [round_robin]),
        "heft": heterogeneous_earliest_finish,
        "expert": expert,
        "exact": _exact,
        "learned": _learned,
        "repair": _repair,
    }
)


def get_placer(name: str) -> Placer:
    """Return the placer of this name.

    Raises:
        InputError: when no placer has it.
    """
    require_choice("placer", name, PLACERS)
    return PLACERS[name]
