"""`fastest`, the best of several ways to place operators, and ways by rules that give every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from weft.errors import InputError
from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.program.arrays import Ints

Placer = Callable[[OperatorGraph, Devices], Placement]
# Gives the device of each operator.
Rule = Callable[[OperatorGraph, Devices], Sequence[int] | Ints]


def fastest(placers: Iterable[Placer], graph: OperatorGraph, devices: Devices) -> Placement:
    """Return the placement with the least makespan, of equal ones the first.

    Raises:
        InputError: of the last placer, when none finds a placement.
    """
    found: list[Placement] = []
    refused: InputError | None = None
    for placer in placers:
        try:
            found.append(placer(graph, devices))
        except InputError as error:
            refused = error
    if not found:
        assert refused is not None, "a placer places operators or refuses"
        raise refused
    return min(found, key=lambda one: one.makespan)


def by_rule(rule: Rule) -> Placer:
    """Return the placer that orders the operators of a rule's devices by the earliest task first."""

    def placed(graph: OperatorGraph, devices: Devices) -> Placement:
        return earliest_task_first(graph, devices, pinned=np.asarray(rule(graph, devices)).tolist())

    return placed
