"""`fastest`, the best of several ways to place operators, and `fastest_of_rules` that give every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from weft.errors import InputError
from weft.planning.placement.board import Placement
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.program.arrays import Ints

Placer = Callable[[OperatorGraph, Devices], Placement]
# Gives the device of each operator.
Rule = Callable[[OperatorGraph, Devices], Sequence[int] | Ints]
Answer = TypeVar("Answer")


def fastest(placers: Iterable[Placer], graph: OperatorGraph, devices: Devices) -> Placement:
    """Return the placement with the least makespan, of equal ones the first.

    Raises:
        InputError: of the last placer, when none finds a placement.
    """
    return min(_answers(partial(one, graph, devices) for one in placers), key=lambda one: one.makespan)


def fastest_of_rules(rules: Iterable[Rule], graph: OperatorGraph, devices: Devices) -> Placement:
    """Return the fastest placement with the devices of a rule, ordered by the earliest task first.

    Raises:
        InputError: when no rule gives devices, or no rule's placement fits.
    """
    given = (np.asarray(one) for one in _answers(partial(rule, graph, devices) for rule in rules))
    # Rules often agree.
    pins = {device.tobytes(): device.tolist() for device in given}
    placers = (partial(earliest_task_first, pinned=one) for one in pins.values())
    return fastest(placers, graph, devices)


def _answers(calls: Iterable[Callable[[], Answer]]) -> list[Answer]:
    """Return all answers but refusals; raise the last refusal if there is no other."""
    found: list[Answer] = []
    refused: InputError | None = None
    for call in calls:
        try:
            found.append(call())
        except InputError as error:
            refused = error
    if not found:
        assert refused is not None, "a call answers or refuses"
        raise refused
    return found
