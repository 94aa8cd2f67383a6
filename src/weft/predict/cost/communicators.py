"""Memory of communicators: buffers that NCCL holds on a rank beside the tensors of a program.

The transport `device` (`weft.run.transport`) opens a communicator for each of the program's groups. Each
group that divides layers or tokens has one, too, and each direction and payload between two ranks.

A communicator has channels: two for each NVLink of 25 GB/s in one direction. For messages it is the next
power of two. A channel has a buffer for every neighbour that it receives from. A collective has one such
neighbour on its ring, and one or two in its trees. A message has one. There, either end of a channel has 2
MiB more.

A buffer has 4 MiB by default (`NCCL_BUFFSIZE` in NCCL's user guide). Two protocols of low latency take 5.2
MiB (`src/include/device.h`). Logs show 10 MiB for the sum, and the 2 MiB
(github.com/NVIDIA/nccl/issues/1685).

Four A100 held 544 MiB for a communicator of two ranks. They held 688 MiB for one of more ranks
(github.com/NVIDIA/nccl/issues/964). The formula gives 480 and 720 MiB. NCCL chooses the channels by the whole
topology, so an interval of 50 % is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.predict.cost.network import Network
from weft.program.arrays import Ints, Mask
from weft.program.kinds import message_kinds
from weft.program.program import NONE, Program

BUFFER_BYTES = 10 * 2**20
END_BYTES = 2 * 2**20
NVLINK_BYTES_PER_S = 25e9
FEWEST_CHANNELS, MOST_CHANNELS = 2, 32
SOURCE = "channels of NCCL"


class Communicators(NamedTuple):
    """The communicators of every rank of a program, and their bytes; both of shape (ranks,)."""

    number: Ints
    held_bytes: Ints

    def __repr__(self) -> str:
        most = max(self.number.tolist(), default=0)
        return one_line(self, f"of {len(self.number)} ranks: at most {most} on a rank")


def communicators(program: Program, plan: Plan, network: Network, twins: Mapping[int, Ints]) -> Communicators:
    """Return the communicators of a plan's program on a cluster; `twins` are those of `twins_of`.

    Ranks of a synchronous device, and all ranks through host memory, have gloo. It takes none of the device's
    memory: their bytes are 0. So are those of a device whose reserve is given, because it has room for
    communicators. A folded program gives the numbers of all ranks.
    """
    cluster, number = network.cluster, np.zeros(program.ranks, dtype=np.int64)
    held = np.zeros(program.ranks, dtype=np.int64)
    columns = program.columns

    @cache
    def of_group(ranks: tuple[int, ...]) -> int:
        return collective_bytes(len(ranks), _narrowest(cluster, ranks))

    for rank, group in _pairs(columns.rank, columns.group, columns.group != NONE):
        number[rank] += 1
        held[rank] += of_group(tuple(program.groups[group]))
    for rank in twins:
        for ranks in plan.divided_groups(rank):
            number[rank] += 1
            held[rank] += of_group(ranks)
    for kinds in message_kinds():
        for kind in kinds:
            for rank, peer in _pairs(columns.rank, columns.peer, columns.kind == kind):
                number[rank] += 1
                link = cluster.link_between(rank, peer)
                held[rank] += message_bytes(link.bytes_per_s, received=kind == kinds[1])
    for rank, alike in twins.items():
        number[alike], held[alike] = number[rank], held[rank]
    holds = np.array([group.device.holds_communicators for group in cluster.groups])
    of_rank = holds[network.places.group[: program.ranks]]
    held[~of_rank | network.through_host] = 0
    return Communicators(number, held)


def channels(bytes_per_s: float) -> int:
    """Return the channels of a communicator over links of this bandwidth in one direction."""
    return min(MOST_CHANNELS, max(FEWEST_CHANNELS, round(2.0 * bytes_per_s / NVLINK_BYTES_PER_S)))


def collective_bytes(ranks: int, bytes_per_s: float) -> int:
    """Return the bytes that each of some ranks holds for their collectives, over links of one kind."""
    neighbours = {1: 0, 2: 2}.get(ranks, 3)
    return channels(bytes_per_s) * neighbours * BUFFER_BYTES


def message_bytes(bytes_per_s: float, *, received: bool) -> int:
    """Return the bytes at one end of a communicator for messages in one direction."""
    count = 1 << (channels(bytes_per_s) - 1).bit_length()
    return count * (BUFFER_BYTES + END_BYTES if received else END_BYTES)


def _narrowest(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Return the bandwidth of a group's narrowest link."""
    # In the order of ranks, those of a node are neighbours.
    first, *others = sorted(ranks)
    ends = {others[0], others[-1]} if others else ()
    return min((cluster.link_between(first, other).bytes_per_s for other in ends), default=0.0)


def _pairs(ranks: Ints, others: Ints, rows: Mask) -> Iterator[tuple[int, int]]:
    """Yield the different pairs (rank, other) of some rows, rising; no number is negative."""
    if rows.any():
        size = int(others[rows].max()) + 1
        for code in np.unique(ranks[rows] * size + others[rows]).tolist():
            yield divmod(code, size)
