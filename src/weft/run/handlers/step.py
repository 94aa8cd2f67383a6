"""The step of a stage's optimizer, which follows all work on the stage's gradient."""

from __future__ import annotations

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, WEIGHTS, Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def step(workspace: Workspace, instruction: Instruction) -> Issue:
    """Step a stage's optimizer once its gradient is complete, then clear the gradient.

    Methods may delay the step, and leave it out. If a stage has handed its buffer back, the next stage to
    claim it clears it.
    """
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    optimizer, statistics = resources.optimizers[stage], resources.statistics[stage]
    bucket, shared = resources.buckets[stage], stage in resources.shards
    gates = [gate for one in resources.methods.values() if (gate := one.gate(workspace, stage)) is not None]

    def issue(stream: Stream) -> Completion:
        awaited = [gate.reads() for gate in gates]

        def work() -> None:
            # Call every gate: each handles its own part of the gradient.
            admitted = [gate.admits(*values) for gate, values in zip(gates, awaited, strict=True)]
            if all(admitted):
                optimizer.step()
                statistics.end_step()
            else:
                statistics.forget()
            for gate in gates:
                gate.stepped()
            if not shared:
                bucket.clear()

        values = (value for one in awaited for value in one)
        stepped = stream.run(label, work, workspace.latest(GRADIENT, stage), *values)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, stepped)
        return stepped

    return issue
