"""m-ETF and HEFT under limits of memory: where memory shrinks, they lose no placement that still fits.

Groups are as large as memory allows, and list scheduling has anomalies. So these alone may place worse with
more memory, and with less. Here limits make the groups, and they do not depend on the memory of the devices.

Both choose the same with less memory, as long as their choices fit. Others do not. An operator of m-SCT is
urgent sooner where fewer devices have room for it. Memory bounds the shares of m-TOPO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from weft.errors import InputError
from weft.planning.placement.board import Placement
from weft.planning.placement.fastest import Placer
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.heft import heterogeneous_earliest_finish
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.preparation import CoPlacement, PreparedGraph, prepared
from weft.program.arrays import Ints

# Memory of all devices together over the bytes that one device would need for all, besides no limit.
LIMITS = (2.4, 1.7, 1.2)
# Placers that can be asked under limits, by the names that users type.
STEADY: Mapping[str, Placer] = MappingProxyType(
    {"m-etf": earliest_task_first, "heft": heterogeneous_earliest_finish}
)


def placed_within_limits(
    graph: OperatorGraph,
    devices: Devices,
    co_placement: CoPlacement = "readers",
    placer: Placer = earliest_task_first,
) -> list[tuple[PreparedGraph, Placement]]:
    """Return a placer's placements under limits, each with the graph that was prepared for its limit.

    Each limit makes groups. Operators are placed within the limit, or within the memory of the devices where
    they have less.

    Args:
        placer: one of `STEADY`.
    """
    found: list[tuple[PreparedGraph, Placement]] = []
    known: dict[bytes, Placement] = {}
    for limit_bytes in _limits(graph, devices):
        reduced = prepared(graph, replace(devices, memory_bytes=limit_bytes), co_placement)
        within = replace(devices, memory_bytes=np.minimum(limit_bytes, devices.memory_bytes))
        same = known.get(groups := reduced.original.groups.tobytes())
        # Among the same groups, the placer chooses the same as long as its choices fit.
        if same is not None and (same.peak_bytes <= within.memory_bytes).all():
            continue
        try:
            known[groups] = placer(reduced.fused, within)
        except InputError:
            continue
        found.append((reduced, known[groups]))
    return found


def _limits(graph: OperatorGraph, devices: Devices) -> Iterator[Ints]:
    """Yield the bytes of each device under each limit, in proportion to their memory."""
    need = int(graph.permanent_bytes.sum()) + int(graph.temporary_bytes.max(initial=0))
    shares = devices.memory_bytes / max(int(devices.memory_bytes.sum()), 1)
    yield np.full(devices.count, np.iinfo(np.int64).max // devices.count)
    for limit in LIMITS:
        yield np.floor(limit * need * shares).astype(np.int64)
