"""What the holders of the same weights do together, and the optimizer's step that waits for it."""

from __future__ import annotations

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import (
    GATHERED,
    NORM,
    REDUCED,
    REDUCED_TIED,
    Compute,
    Transfer,
)
from weft.run.work_queue import Handle, Job, Promise, Stamp, nothing_to_wait_for
from weft.run.workspace import Workspace


def gather(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Bring a stage's weights up to date from all shares, on the thread of the collective stream."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    shard = resources.shards[stage]

    def post(stamp: Stamp) -> Handle:
        shard.weights.claim()
        handle = resources.collectives.put(Job(Promise(label), shard.gather, stamp))
        workspace.values[GATHERED, stage, NONE] = handle
        return handle

    return Transfer(post)


def free(workspace: Workspace, instruction: Instruction) -> Compute:
    """Give the room of a stage's weights to the next one."""
    return Compute(nothing_to_wait_for, workspace.resources.shards[instruction.stage].weights.free)


def reduce(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Make the replicas of a stage agree on its gradient, on the thread of the collective stream.

    Where they share out what they step, each gets its share of the sum, and the gradient's buffer is free
    for another stage.
    """
    stage, part, label, resources = instruction.stage, instruction.part, str(instruction), workspace.resources
    bucket, shard = resources.buckets[stage], resources.shards.get(stage)
    group = resources.groups.collective[instruction.group]

    def run() -> torch.Tensor:
        if shard is not None:
            return shard.take_in(resources.synchroniser.reduce_scatter(bucket.flat, group), part)
        resources.synchroniser.reduce(bucket.flat, group)
        return bucket.flat

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Promise(label), run, stamp))
        workspace.values[REDUCED, stage, NONE] = handle
        if shard is not None:
            bucket.hand_back(handle.wait)
        return handle

    return Transfer(post)


def reduce_across(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Add up a stage's own share of the gradient with those of other islands, on the collectives' thread."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    shard, group = resources.shards[stage], resources.groups.collective[instruction.group]

    def run() -> torch.Tensor:
        resources.synchroniser.reduce(shard.own_gradient, group)
        return shard.own_gradient

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Promise(label), run, stamp))
        workspace.values[REDUCED, stage, NONE] = handle
        return handle

    return Transfer(post)


def reduce_tied(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Add up the gradients of all copies of a weight, on the thread of the collective stream."""
    part, label, resources = instruction.part, str(instruction), workspace.resources
    tied, group = resources.tied[part], resources.groups.collective[instruction.group]

    def run() -> torch.Tensor:
        return tied.reduce(resources.synchroniser, group)

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Promise(label), run, stamp))
        for stage in tied.stages:
            workspace.values[REDUCED_TIED, stage, part] = handle
        return handle

    return Transfer(post)


def norm(workspace: Workspace, instruction: Instruction) -> Transfer:
    """Take the norm of the whole gradient, on the thread of the collective stream."""
    label, resources = str(instruction), workspace.resources
    gradient_norm, group = resources.gradient_norm, resources.groups.collective[instruction.group]
    assert gradient_norm is not None, "a program with norms has something to take them of"

    def post(stamp: Stamp) -> Handle:
        handle = resources.collectives.put(Job(Promise(label), lambda: gradient_norm.take(group), stamp))
        workspace.values[NORM, NONE, NONE] = handle
        return handle

    return Transfer(post)


def step(workspace: Workspace, instruction: Instruction) -> Compute:
    """Step a stage's optimizer once its gradient is reduced, then clear the gradient.

    Where the norm of the whole gradient is taken, the gradient is clipped to it; all ranks leave the step out
    where the norm is not finite. A gradient that was handed back is cleared by the next stage to claim its
    buffer.
    """
    stage = instruction.stage
    shared = stage in workspace.resources.shards
    statistics = workspace.resources.statistics[stage]
    gradient_norm = workspace.resources.gradient_norm
    optimizer, bucket = workspace.resources.optimizers[stage], workspace.resources.buckets[stage]
    tied = {part: one for part, one in workspace.resources.tied.items() if stage in one.stages}

    def ready() -> None:
        for part in tied:
            workspace.values.pop((REDUCED_TIED, stage, part)).wait()
        reduced = workspace.values.pop((REDUCED, stage, NONE), None)
        if reduced is not None:
            reduced.wait()
        if gradient_norm is not None:
            gradient_norm.settle(workspace.values[NORM, NONE, NONE].wait().item())

    def execute() -> None:
        if gradient_norm is None or gradient_norm.clip(stage):
            optimizer.step()
            statistics.end_step()
        else:
            statistics.forget()
        for one in tied.values():
            one.clear(stage)
        if not shared:
            bucket.clear()

    return Compute(ready, execute)
