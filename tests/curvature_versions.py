"""The steps whose rows are in the inverses that K-FAC uses, from the order of a program's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.methods.bubble_filling.kinds import owed_by as windows_of
from weft.methods.kfac.kinds import (
    INPUT_CURVATURE,
    INVERT_INPUT,
    INVERT_OUTPUT,
    OUTPUT_CURVATURE,
    PRECONDITION,
    PRECONDITION_SHARDS,
    REDUCE_INPUT,
    REDUCE_OUTPUT,
    owed_by,
)
from weft.methods.kfac.linears import FACTORS
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD
from weft.program.program import NONE, Program

NEVER = -1


class Version(NamedTuple):
    """The steps whose rows are in an inverse, and in the mean of the other side; `NEVER` for none."""

    sum: int
    other: int


# Of each factor of inputs, and of outputs; None before there are any.
BlockVersions = tuple[tuple[Version, ...], tuple[Version, ...]] | None


@dataclass
class _Block:
    """A block's rows, sums and inverses: the steps that they are of, in place of tensors."""

    left: dict[tuple[int, int], int] = field(default_factory=dict)
    sums: list[int] = field(default_factory=lambda: [NEVER, NEVER])
    means: list[int] = field(default_factory=lambda: [NEVER, NEVER])
    added: list[int] = field(default_factory=lambda: [0, 0])
    begun: set[tuple[int, int]] = field(default_factory=set)
    inverted: dict[tuple[int, int], Version] = field(default_factory=dict)
    current: BlockVersions = None


def versions_in(program: Program, steps: int) -> tuple[tuple[BlockVersions, ...], ...]:
    """Walk through a program's rows; return by step and block the inverses that the step uses."""
    owed, windows = owed_by(program), windows_of(program)
    assert owed is not None
    assert windows is not None
    columns = program.columns
    counts = {layer: count for some in owed.layers for layer, count in some.items()}
    replicas = int(columns.replica.max()) + 1
    micro_batches = program.obligations.forward[:, 2].max() // replicas + 1
    blocks = {layer: _Block() for layer in counts}
    # Tensor ranks of a replica do alike; the first one of each stage stands for them.
    rank = {
        stage: columns.rank[(columns.stage == stage) & (columns.replica == 0)].min() for stage in owed.stages
    }
    leads = columns.rank == np.array([rank.get(stage, NONE) for stage in columns.stage.tolist()])
    found = []
    for step in range(steps):
        used: dict[int, BlockVersions] = {}
        now = (columns.iteration == step % program.steps_per_cycle) & (columns.replica == 0) & leads
        for row in np.flatnonzero(now).tolist():
            kind, stage, part = (int(one[row]) for one in (columns.kind, columns.stage, columns.part))
            micro_batch = int(columns.micro_batch[row])
            if kind in (FORWARD, BACKWARD, BACKWARD_INPUT) and step % windows.steps[stage] == 0:
                for block in owed.layers[stage]:
                    assert (kind != FORWARD, micro_batch) not in blocks[block].left, "tensors were not used"
                    blocks[block].left[kind != FORWARD, micro_batch] = step
            elif kind in (INPUT_CURVATURE, OUTPUT_CURVATURE):
                _add(blocks[part], int(kind == OUTPUT_CURVATURE), micro_batch, counts[part])
                side = int(kind == OUTPUT_CURVATURE)
                if replicas == 1 and blocks[part].added[side] == micro_batches:
                    _complete(blocks[part], side)
            elif kind in (REDUCE_INPUT, REDUCE_OUTPUT):
                _complete(blocks[part], int(kind == REDUCE_OUTPUT))
            elif kind in (INVERT_INPUT, INVERT_OUTPUT):
                _invert(
                    blocks[part // FACTORS],
                    int(kind == INVERT_OUTPUT),
                    part % FACTORS,
                    counts[part // FACTORS],
                )
            elif kind in (PRECONDITION, PRECONDITION_SHARDS):
                used |= {block: blocks[block].current for block in owed.layers[stage]}
        found.append(tuple(used[block] for block in sorted(blocks)))
    return tuple(found)


def _add(block: _Block, side: int, micro_batch: int, counts: tuple[int, int]) -> None:
    step = block.left.pop((side, micro_batch), NEVER)
    if step == NEVER:
        return
    assert block.added[side] == 0 or block.sums[side] == step, "a sum holds rows of two windows"
    block.sums[side] = step
    block.added[side] += 1
    block.begun |= {(side, number) for number in range(counts[side])}


def _complete(block: _Block, side: int) -> None:
    block.added[side], block.means[side] = 0, block.sums[side]


def _invert(block: _Block, side: int, number: int, counts: tuple[int, int]) -> None:
    if (side, number) not in block.begun:
        return
    assert block.added[side] == 0, "an inverse is of a part of a step"
    block.begun.remove((side, number))
    block.inverted[side, number] = Version(block.sums[side], block.means[1 - side])
    if len(block.inverted) == sum(counts):
        inputs, outputs = (tuple(block.inverted[one, n] for n in range(counts[one])) for one in (0, 1))
        block.current, block.inverted = (inputs, outputs), {}
