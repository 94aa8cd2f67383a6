"""The step of a stage's optimizer, which follows all work on the stage's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import COPIED, GRADIENT, WEIGHTS, Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace

# Their fused kernels leave a step out by themselves. That of SGD does, too, but then its first momenta are
# memory that nothing has written.
_LEAVE_OUT: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
_VOTE = "found_inf"


def step(workspace: Workspace, instruction: Instruction) -> Issue:
    """Step a stage's optimizer once its gradient is complete, then clear the gradient.

    Methods may delay the step, and leave it out. Where the optimizer and the stage allow it, the device
    decides that, and the host goes on. If a stage has handed its buffer back, the next stage to claim it
    clears it.
    """
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    optimizer, statistics = resources.optimizers[stage], resources.statistics[stage]
    bucket, shared = resources.buckets[stage], stage in resources.shards
    gates = [gate for one in resources.methods.values() if (gate := one.gate(workspace, stage)) is not None]
    device_decides = _leaves_out(optimizer) and not statistics.collects

    def issue(stream: Stream) -> Completion:
        awaited = [gate.reads() for gate in gates]

        def work() -> None:
            # Call every gate: each handles its own part of the gradient.
            votes = [gate.votes(*values) for gate, values in zip(gates, awaited, strict=True)]
            against = [vote for vote in votes if vote is not None]
            if device_decides:
                _step_unless(optimizer, against)
            elif not any(vote.item() for vote in against):
                optimizer.step()
                statistics.end_step()
            else:
                statistics.forget()
            for gate in gates:
                gate.stepped()
            if not shared:
                bucket.clear()

        values = (value for one in awaited for value in one)
        there = workspace.latest(GRADIENT, stage), workspace.latest(COPIED, NONE)
        stepped = stream.run(label, work, *there, *values)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, stepped)
        return stepped

    return issue


def _leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's kernels leave a step out when a tensor says so."""
    return type(optimizer) in _LEAVE_OUT and all(group["fused"] for group in optimizer.param_groups)


def _step_unless(optimizer: torch.optim.Optimizer, votes: Sequence[torch.Tensor]) -> None:
    """Step unless a vote is 1; the host reads none. `torch.amp.GradScaler` sets the same attribute."""
    if not votes:
        optimizer.step()
        return
    setattr(optimizer, _VOTE, torch.stack(tuple(votes)).amax())
    try:
        optimizer.step()
    finally:
        delattr(optimizer, _VOTE)
