"""The handlers of the five instructions of a piece."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.methods.clan.kinds import BETWEEN
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Handler, Issue
from weft.run.methods import HandlerOf
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Meeting

Work = Callable[[TwoWaySums, torch.Tensor, Meeting], None]


def handler_of(work_of: Work, reads: str, writes: str) -> Handler:
    """Return the handler that does the work of an instruction between two values of its piece.

    The first one follows the backward passes, and the last one is the latest work on the stage's gradient.
    """

    def handle(workspace: Workspace, instruction: Instruction) -> Issue:
        stage, part, label = instruction.stage, instruction.part, str(instruction)
        resources = workspace.resources
        synchroniser, flat = resources.synchroniser, resources.buckets[stage].flat
        assert isinstance(synchroniser, TwoWaySums), "the method brings its own"

        def issue(stream: Stream) -> Completion:
            meeting = Meeting(
                group=synchroniser.group_of(stage),
                stage=stage,
                step=workspace.step,
                part=part,
                replica=instruction.replica,
                seed=resources.seed,
            )

            def work() -> None:
                work_of(synchroniser, flat, meeting)

            begins = reads == GRADIENT
            read = workspace.latest(GRADIENT, stage) if begins else workspace.values[reads, stage, part]
            done = Value.of(None, stream.run(label, work, read))
            workspace.values[writes, stage, NONE if writes == GRADIENT else part] = done
            return done.completion

        return issue

    return handle


HANDLERS = tuple(
    HandlerOf(kind=kind, handler=handler_of(work, reads, writes))
    for kind, work, reads, writes in (
        ("compress", TwoWaySums.compress, GRADIENT, BETWEEN[0]),
        ("push", lambda sums, flat, meeting: sums.push(meeting), BETWEEN[0], BETWEEN[1]),
        ("aggregate", TwoWaySums.aggregate, BETWEEN[1], BETWEEN[2]),
        ("pull", lambda sums, flat, meeting: sums.pull(meeting), BETWEEN[2], BETWEEN[3]),
        ("decompress", TwoWaySums.decompress, BETWEEN[3], GRADIENT),
    )
)
