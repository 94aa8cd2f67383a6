"""The step of a stage's optimizer, which follows all work on the stage's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import BEGUN, COPIED, GRADIENT, WEIGHTS, Issue
from weft.run.state.votes import decided, leaves_out, leaving_out
from weft.run.state.whole_matrices import WholeMatricesOptimizer
from weft.run.state.whole_sums import WholeSumsOptimizer
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace

Awaited = Sequence[tuple[Value[Any], ...]]


class BegunStep(NamedTuple):
    """A step whose first parts earlier instructions have run.

    Attributes:
        left_out: 1 to leave the step out, else 0, of shape (); None if no method has a vote.
        whole: the last sums over whole tensors, shape (sums, parameters); None if it needs none.
    """

    left_out: torch.Tensor | None
    whole: torch.Tensor | None = None


# Runs a part of a step before the step, from `BegunStep.left_out` and what the part before it has left.
BeginStep = Callable[[torch.Tensor | None, BegunStep | None], BegunStep]


class StepGates:
    """The conditions of methods on the step of a stage."""

    def __init__(self, workspace: Workspace, stage: int) -> None:
        methods = workspace.resources.methods.values()
        self._gates = [gate for one in methods if (gate := one.gate(workspace, stage)) is not None]

    def reads(self) -> Awaited:
        """Return the values that each gate waits for; called when the step's first instruction is issued."""
        return [gate.reads() for gate in self._gates]

    def left_out(self, awaited: Awaited) -> torch.Tensor | None:
        """Return 1 if a vote is 1, to leave the step out, else 0, of shape (); None without votes."""
        # Call every gate: each handles its own part of the gradient.
        votes = [gate.votes(*values) for gate, values in zip(self._gates, awaited, strict=True)]
        return decided([vote for vote in votes if vote is not None])

    def stepped(self) -> None:
        for gate in self._gates:
            gate.stepped()


def followed(workspace: Workspace, stage: int) -> tuple[Value[Any], ...]:
    """Return the values that every step follows: its gradient, and the last copy of weights and states."""
    return workspace.latest(GRADIENT, stage), workspace.latest(COPIED, NONE)


def begin_step(workspace: Workspace, instruction: Instruction, part: BeginStep, *, first: bool) -> Issue:
    """Run a part of a stage's step before it; the `first` one waits for all that the step waits for."""
    stage, label, gates = instruction.stage, str(instruction), StepGates(workspace, instruction.stage)

    def issue(stream: Stream) -> Completion:
        made: Value[BegunStep] = Value()
        before: Value[BegunStep] | None = None if first else workspace.values[BEGUN, stage, NONE]
        awaited = gates.reads() if before is None else [(before,)]
        reads = chain(followed(workspace, stage), *awaited)

        def work() -> None:
            begun = None if before is None else before.content
            made.content = part(gates.left_out(awaited) if begun is None else begun.left_out, begun)

        made.completion = stream.run(label, work, *reads)
        workspace.values[BEGUN, stage, NONE] = made
        # The gradient is another one from now on.
        workspace.values[GRADIENT, stage, NONE] = Value.of(None, made.completion)
        return made.completion

    return issue


def step(workspace: Workspace, instruction: Instruction) -> Issue:
    """Step a stage's optimizer once its gradient is complete, then clear the gradient.

    Methods may delay the step, and leave it out. Where the optimizer allows it, the device decides that, and
    the host goes on. A method may have begun the step in an earlier instruction. If a stage
    has handed its buffer back, the next stage to claim it clears it.
    """
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    optimizer, statistics = resources.optimizers[stage], resources.statistics[stage]
    bucket, shared = resources.buckets[stage], stage in resources.shards
    gates, device_decides = StepGates(workspace, stage), leaves_out(optimizer)

    def issue(stream: Stream) -> Completion:
        begun: Value[BegunStep] | None = workspace.values.pop((BEGUN, stage, NONE), None)
        awaited = gates.reads() if begun is None else [(begun,)]
        reads = chain(followed(workspace, stage), *awaited)

        def work() -> None:
            left_out = gates.left_out(awaited) if begun is None else begun.content.left_out
            if device_decides:
                with leaving_out(optimizer, left_out):
                    _finish(optimizer, begun)
            # Here the host waits for the number.
            elif left_out is None or not left_out.item():
                optimizer.step()
            statistics.end_step(left_out)
            gates.stepped()
            if not shared:
                bucket.clear()

        stepped = stream.run(label, work, *reads)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, stepped)
        return stepped

    return issue


def _finish(optimizer: torch.optim.Optimizer, begun: Value[BegunStep] | None) -> None:
    if begun is not None and isinstance(optimizer, WholeMatricesOptimizer):
        optimizer.step(begun=True)
    elif begun is not None and isinstance(optimizer, WholeSumsOptimizer):
        optimizer.step(whole=begun.content.whole)
    else:
        optimizer.step()
