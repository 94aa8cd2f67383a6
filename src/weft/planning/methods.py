"""The methods that `weft.planning.curve` compares: orders of micro-batches, and their execution."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Blocking, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One line of the curve: an order of micro-batches, and its execution.

    Attributes:
        name: the name in tables.
        schedule: its schedule.
        looped: with several stages per device, or with one.
        pipelined: over several devices, or layer by layer on one.
        blocking: communication that does not overlap computation.
        sharding: the only sharding; None leaves it to the planner.
    """

    name: str
    schedule: str
    looped: bool = False
    pipelined: bool = True
    blocking: tuple[Blocking, ...] = ()
    sharding: Sharding | None = None

    def admits(self, layout: Layout) -> bool:
        """Return True if a layout of the schedule is one of the method."""
        if not self.pipelined:
            return layout.pp == 1
        return layout.pp > 1 and (layout.loops > 1) == self.looped

    def loops(self, job: Job) -> tuple[int | None, ...]:
        """Return the numbers of stages per device to pin; None leaves them to the planner. Without a pipeline
        the stages are the units that sharded weights are gathered by, up to one layer each."""
        if self.pipelined:
            return (None if self.looped else 1,)
        layers = len(job.graph.layers)
        return tuple(1 << power for power in range(layers.bit_length()))


def _as_shipped(method: Method) -> Method:
    """Return the method as Megatron-LM first shipped it (Narayanan et al., arXiv 2104.04473)."""
    return replace(
        method,
        name=f"{method.name} as shipped",
        blocking=("messages", "reductions"),
        sharding="zero-0",
    )


BREADTH_FIRST = Method(name="breadth-first", schedule="breadth-first", looped=True)
DEPTH_FIRST = Method(name="depth-first", schedule="depth-first", looped=True)
ONE_FORWARD_ONE_BACKWARD = Method(name="1f1b", schedule="1f1b")
GPIPE = Method(name="gpipe", schedule="gpipe")
# Each layer runs all its micro-batches before the next one does, so it is gathered once in a pass.
NO_PIPELINE = Method(name="no pipeline", schedule="breadth-first", pipelined=False)
# The rivals of breadth-first: each with its communication overlapped, and as it was shipped.
RIVALS = {
    DEPTH_FIRST: _as_shipped(DEPTH_FIRST),
    ONE_FORWARD_ONE_BACKWARD: _as_shipped(ONE_FORWARD_ONE_BACKWARD),
}
METHODS = (BREADTH_FIRST, DEPTH_FIRST, ONE_FORWARD_ONE_BACKWARD, GPIPE, NO_PIPELINE, *RIVALS.values())
