"""The orders of micro-batches, by name: weft's own and third-party ones.

A third party adds one through the entry-point group `weft.schedules`. The entry point names a class that
follows `weft.program.schedules.base.Schedule` and takes no arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import cast

from weft.errors import InputError, Violation, nearest
from weft.installed import with_installed
from weft.program.kinds import BACKWARD_INPUT
from weft.program.schedules.base import Pipeline, Schedule, searched_options
from weft.program.schedules.breadth_first import BreadthFirst
from weft.program.schedules.checked import CheckedSchedule
from weft.program.schedules.chimera import Chimera
from weft.program.schedules.depth_first import DepthFirst
from weft.program.schedules.gpipe import GPipe
from weft.program.schedules.graph_1f1b import GraphOneForwardOneBackward
from weft.program.schedules.graph_zb_h1 import GraphZeroBubbleH1
from weft.program.schedules.hybrid import Hybrid
from weft.program.schedules.one_forward_one_backward import OneForwardOneBackward
from weft.program.schedules.placed import PlacedOrder, PlacedZeroBubble
from weft.program.schedules.zb_h1 import ZeroBubbleH1
from weft.program.schedules.zb_v import ZeroBubbleV

_MEMBERS = ("name", "synonyms", "options", "refuse", "placement", "order")
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            GPipe(),
            OneForwardOneBackward(),
            GraphOneForwardOneBackward(),
            DepthFirst(),
            BreadthFirst(),
            Hybrid(),
            ZeroBubbleH1(),
            GraphZeroBubbleH1(),
            ZeroBubbleV(),
            Chimera(),
            PlacedOrder(),
            PlacedZeroBubble(),
        )
    }
)


def all_schedules() -> Mapping[str, Schedule]:
    """Return every known schedule by name, weft's own first.

    Raises:
        InputError: when two schedules share a name, or an installed one lacks a member.
    """
    return with_installed("schedule", SCHEDULES, _MEMBERS, lambda one: cast("Schedule", CheckedSchedule(one)))


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name.

    Raises:
        InputError: when there is none, with the nearest name, or weft's name for another framework's name.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    table = all_schedules()
    if name in table:
        return table[name]
    words = {word.lower(): known for known, schedule in table.items() for word in (known, *schedule.synonyms)}
    meant = words.get(nearest(name.lower(), words), "")
    raise InputError(Violation("schedule", f"{name!r} is not one of {', '.join(sorted(table))}", meant))


@cache
def splits_backward(name: str, devices: int) -> bool:
    """Return True if a schedule computes backwards in two parts, in short pipelines of so many devices."""
    schedule = get_schedule(name)
    probes = (Pipeline(devices, loops * devices, devices) for loops in (1, 2))
    return any(
        BACKWARD_INPUT in schedule.order(probe, 0, options).kind
        for probe, options in product(probes, searched_options(schedule))
        if schedule.refuse(probe, options) is None
    )
