"""`Costs`: how long each instruction of a Program occupies its stream, and how late its effect arrives."""

from __future__ import annotations

from dataclasses import dataclass

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
        synchronous: per rank, whether the host computes itself, so that later instructions are posted only
            when the current computation has ended.
        live_bytes: change of the rank's live bytes when the instruction ends (negative: freed).
        base_bytes: per rank, bytes held all the time: weights, gradients, optimizer state, buffers.
        links: shape (instructions, 2): numbers of the two links that a message occupies, where it leaves its
            node and where it enters another; -1 where it does not. Both have the same capacity: messages that
            overlap on a link share it, and each takes its occupancy when alone. None: messages share nothing.
        group_links: by group of the program, the links that its collectives occupy: of every node they span
            the one in each direction, numbered like `links`. None: collectives share nothing.
        demand: part of the capacity of its links that an instruction uses while it is alone there, more than
            0 where it uses any and at most 1. None: all of it.
        lead: ticks before the end of what an instruction waits for at which it may already start: the first
            gradients of a stage are ready to be reduced before its backward has ended. None: none may.
        rest: ticks by which an instruction with a lead ends at the earliest after what it waits for has
            ended. None: it ends when its occupancy has passed.
        compute_slowdown: per rank, how many times longer a computation takes while a message or collective of
            the rank is under way; at least 1. None: nothing is slowed.
        communication_slowdown: per rank, how many times longer a message or collective takes while the rank
            computes; at least 1. None: nothing is slowed.
    """

    occupancy: Ints
    latency: Ints
    tick_s: float
    synchronous: Mask
    live_bytes: Ints
    base_bytes: Ints
    links: Ints | None = None
    group_links: tuple[tuple[int, ...], ...] | None = None
    demand: Floats | None = None
    lead: Ints | None = None
    rest: Ints | None = None
    compute_slowdown: Floats | None = None
    communication_slowdown: Floats | None = None

    def __repr__(self) -> str:
        return one_line(self, f"of {len(self.occupancy)} instructions on {len(self.base_bytes)} ranks")
