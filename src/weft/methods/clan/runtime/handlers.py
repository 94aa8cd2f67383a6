"""The handlers of the five instructions of a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from weft.methods.clan.kinds import BETWEEN
from weft.methods.clan.options import NAME
from weft.methods.clan.report import CONTRACTION, ERRORS
from weft.methods.clan.runtime.aggregator import Aggregator
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.methods.clan.runtime.state import AggregatorState
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Handler, Issue
from weft.run.methods import HandlerOf
from weft.run.resources import Resources
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Group, Meeting

Work = Callable[[TwoWaySums, torch.Tensor, Meeting], Sequence[torch.Tensor] | None]
ServersWork = Callable[[Aggregator, Meeting], None]


def handler_of(
    work_of: Work,
    reads: str,
    writes: str,
    numbers: Sequence[str] = (),
    on_servers: ServersWork | None = None,
) -> Handler:
    """Return the handler of an instruction between two values of its piece.

    `numbers` names the results of the work. The first instruction follows the backward passes. The last one
    is the latest work on the stage's gradient. A rank without the read value follows the value before it.
    If it has none, it takes a piece from others.
    """

    def handle(workspace: Workspace, instruction: Instruction) -> Issue:
        stage, part, label = instruction.stage, instruction.part, str(instruction)
        resources, values = workspace.resources, workspace.values
        group, bound = _bound(work_of, on_servers, resources, stage)
        before = [name for name, after in pairwise(BETWEEN) if after == reads]

        def issue(stream: Stream) -> Completion:
            meeting = Meeting(
                group=group,
                stage=stage,
                step=workspace.step,
                part=part,
                replica=instruction.replica,
                seed=resources.seed,
            )
            made: dict[str, Value[torch.Tensor]] = {name: Value() for name in numbers}

            def work() -> None:
                for value, number in zip(made.values(), bound(meeting) or (), strict=True):
                    value.content = number

            if reads == GRADIENT:
                read = [workspace.latest(GRADIENT, stage)]
            else:
                read = [values[key] for name in (reads, *before) if (key := (name, stage, part)) in values]
            done = stream.run(label, work, *read[:1])
            values[writes, stage, NONE if writes == GRADIENT else part] = Value.of(None, done)
            for name, value in made.items():
                value.completion = done
                values[name, stage, NONE] = value
            return done

        return issue

    return handle


def _bound(
    work_of: Work, on_servers: ServersWork | None, resources: Resources, stage: int
) -> tuple[Group, Callable[[Meeting], Sequence[torch.Tensor] | None]]:
    """Return the group of a stage and the work of this rank, a replica of the stage or a server."""
    method, synchroniser = resources.methods[NAME], resources.synchroniser
    if isinstance(method, AggregatorState):
        assert on_servers is not None, "servers have no other instructions"
        return method.group_of(stage), partial(on_servers, method.aggregator)
    assert isinstance(synchroniser, TwoWaySums), "the method brings its own"
    return synchroniser.group_of(stage), partial(work_of, synchroniser, resources.buckets[stage].flat)


_PUSH = handler_of(TwoWaySums.push, BETWEEN[0], BETWEEN[1], on_servers=Aggregator.push)
_PULL = handler_of(TwoWaySums.pull, BETWEEN[2], BETWEEN[3], on_servers=Aggregator.pull)
HANDLERS = (
    HandlerOf(
        kind="compress", handler=handler_of(TwoWaySums.compress, GRADIENT, BETWEEN[0], (CONTRACTION, ERRORS))
    ),
    HandlerOf(
        kind="aggregate",
        handler=handler_of(TwoWaySums.aggregate, BETWEEN[1], BETWEEN[2], on_servers=Aggregator.aggregate),
    ),
    HandlerOf(kind="decompress", handler=handler_of(TwoWaySums.decompress, BETWEEN[3], GRADIENT)),
    *(HandlerOf(kind=kind, handler=_PUSH) for kind in ("push", "push_to_servers")),
    *(HandlerOf(kind=kind, handler=_PULL) for kind in ("pull", "pull_from_servers")),
)
