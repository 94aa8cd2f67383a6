"""`Costs`: the time of each instruction of a Program on its stream, and the delay of its effect."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.describe.one_line import one_line
from weft.program.arrays import Floats, Ints, Mask


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One row per instruction of the program, in integer ticks.

    Attributes:
        occupancy: time on the instruction's own stream.
        latency: further time before dependent instructions may start (a message on its way); the stream is
            already free.
        tick_s: seconds per tick; 1e-9 for plans, any exact fraction for abstract schedules.
        synchronous: per rank, True if the host computes itself, so that it posts later instructions only
            after the current computation.
        live_bytes: change of the rank's live bytes when the instruction ends (negative: freed).
        working_bytes: bytes that the instruction takes while it runs, beside the live ones. None: nothing.
        base_bytes: per rank, bytes held all the time: weights, gradients, optimizer state, buffers.
        links: shape (instructions, 2): numbers of a message's links out of its node and into another; -1
            inside a node. Both have the same capacity. Messages that overlap on a link share it; alone,
            each takes its occupancy. None: messages share nothing.
        group_links: by group of the program, the links of its collectives: one in each direction for every
            spanned node, numbered like `links`. None: collectives share nothing.
        demand: part of the capacity of its links that an instruction uses alone, at most 1, and more than 0
            if it uses any. None: all of it.
        lead: ticks by which an instruction may start before the end of its inputs: the first gradients of a
            stage are ready for reduction before its backward has ended. None: no early starts.
        rest: least ticks from the end of its inputs to the end of an instruction with a lead. None: it ends
            after its occupancy.
        compute_slowdown: per rank, factor of a computation's time while a message or collective of the rank
            is under way; at least 1. None: no slowdown.
        communication_slowdown: per rank, factor of the time of a message or collective while the rank
            computes; at least 1. None: no slowdown.
    """

    occupancy: Ints
    latency: Ints
    tick_s: float
    synchronous: Mask
    live_bytes: Ints
    base_bytes: Ints
    working_bytes: Ints | None = None
    links: Ints | None = None
    group_links: tuple[tuple[int, ...], ...] | None = None
    demand: Floats | None = None
    lead: Ints | None = None
    rest: Ints | None = None
    compute_slowdown: Floats | None = None
    communication_slowdown: Floats | None = None

    @property
    def working(self) -> Ints:
        """The working bytes, zeros if there are none."""
        return np.zeros_like(self.live_bytes) if self.working_bytes is None else self.working_bytes

    def __repr__(self) -> str:
        return one_line(self, f"of {len(self.occupancy)} instructions on {len(self.base_bytes)} ranks")
