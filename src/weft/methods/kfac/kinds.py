"""The instructions of K-FAC: curvature of micro-batches, its sum over replicas, inverses, and their use.

A micro-batch leaves the inputs of a stage's linear layers, and the gradients of their outputs. `part` of
curvature and sums is a layer's position in the model; that of inverses also counts the layer's factors.
Tensor ranks exchange within curvature and preconditioning, as within passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.methods.bubble_filling.kinds import owed_by as windows_of
from weft.methods.kfac.linears import FACTORS
from weft.methods.kfac.options import NAME
from weft.methods.sharding.kinds import between_islands
from weft.methods.tensor_norms.kinds import first
from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import At, Places, of_links, stepped_on_rank, table_of
from weft.program.program import Owed, Program
from weft.program.values import PER_MICRO_BATCH, PER_STAGE, VALUES, Read, Use, ValueKind


@dataclass(frozen=True, kw_only=True)
class Preconditions(Owed):
    """The obligation of every stage to multiply its gradient by inverse factors before it steps.

    Attributes:
        layers: by stage and position of a layer, its factors of inputs and of outputs.
    """

    layers: tuple[Mapping[int, tuple[int, int]], ...]

    def factors(self, side: int) -> Ints:
        """Return pairs of a stage and the part of an inverse, for the factors of one side."""
        return table_of(
            [
                (stage, layer * FACTORS + number)
                for stage, layers in enumerate(self.layers)
                for layer, counts in layers.items()
                for number in range(counts[side])
            ]
        )

    @property
    def stages(self) -> list[int]:
        """The stages with layers that are treated."""
        return [stage for stage, layers in enumerate(self.layers) if layers]


def owed_by(program: Program) -> Preconditions | None:
    """Return the obligation of a program; None without one."""
    owed = program.obligations.methods.get(NAME)
    return owed if isinstance(owed, Preconditions) else None


def captured(program: Program, rows: Ints) -> Places:
    """Return the rows in the first step of a window of their stage, if it has treated layers."""
    windows, owed = windows_of(program), owed_by(program)
    if windows is None or owed is None:
        return Places(rows[:0])
    columns, steps = program.columns, np.array(windows.steps, dtype=np.int64)
    stage = columns.stage[rows]
    return Places(rows[(columns.iteration[rows] % steps[stage] == 0) & np.isin(stage, owed.stages)])


def of_layer(program: Program, rows: Ints) -> Places:
    """Return the place of the layer of each inverse."""
    return Places(rows, {"part": program.columns.part[rows] // FACTORS})


def _inverses(side: int) -> At:
    """Return the way to the places of all inverses of one side in the stages of rows."""

    def at(program: Program, rows: Ints) -> Places:
        owed = owed_by(program)
        return Places(rows[:0]) if owed is None else of_links(program, rows, "part", owed.factors(side))

    return at


def treated(program: Program, rows: Ints) -> Places:
    """Return the rows of stages with treated layers, in programs that precondition."""
    owed = owed_by(program)
    if owed is None:
        return Places(rows[:0])
    return Places(rows[np.isin(program.columns.stage[rows], owed.stages)])


def treated_on_rank(program: Program, rows: Ints) -> Places:
    """Return each stage with treated layers that the rows' ranks step, in programs that precondition."""
    owed = owed_by(program)
    if owed is None:
        return Places(rows[:0])
    places = stepped_on_rank(program, rows)
    return places.take(np.isin(places.moved["stage"], owed.stages))


for _side in ("input", "output"):
    VALUES.register(ValueKind(name=f"{_side}_factor", scope=(*PER_STAGE, "part"), until="written"))
    VALUES.register(ValueKind(name=f"{_side}_inverse", scope=(*PER_STAGE, "part"), until="written"))
VALUES.register(ValueKind(name="linear_inputs", scope=PER_MICRO_BATCH, until="written"))
VALUES.register(ValueKind(name="linear_gradients", scope=PER_MICRO_BATCH, until="written"))
VALUES.register(ValueKind(name="preconditioned", scope=PER_STAGE, until="read"))


def _curvature(side: str, symbol: str, leaves: str) -> int:
    factor = f"{side}_factor"
    return KINDS.register(
        Kind(
            name=f"{side}_curvature",
            symbol=symbol,
            stream="compute",
            reads=(leaves, factor),
            writes=(factor,),
            tensor_reduced=True,
        )
    )


def _sum(side: str, symbol: str) -> int:
    factor = f"{side}_factor"
    return KINDS.register(
        Kind(
            name=f"reduce_{side}_curvature",
            symbol=symbol,
            stream="collective",
            reads=(factor,),
            writes=(factor,),
            collective=True,
        )
    )


def _inverse(side: str, symbol: str) -> int:
    return KINDS.register(
        Kind(
            name=f"invert_{side}_curvature",
            symbol=symbol,
            stream="compute",
            reads=(Read(f"{side}_factor", at=of_layer),),
            writes=(f"{side}_inverse",),
        )
    )


INPUT_CURVATURE = _curvature("input", "CA", "linear_inputs")
OUTPUT_CURVATURE = _curvature("output", "CB", "linear_gradients")
REDUCE_INPUT, REDUCE_OUTPUT = _sum("input", "RA"), _sum("output", "RZ")
INVERT_INPUT, INVERT_OUTPUT = _inverse("input", "IA"), _inverse("output", "IB")
# By side.
CURVATURES, REDUCTIONS, INVERSIONS = (
    (INPUT_CURVATURE, OUTPUT_CURVATURE),
    (REDUCE_INPUT, REDUCE_OUTPUT),
    (INVERT_INPUT, INVERT_OUTPUT),
)
_MULTIPLIED = (
    Read("reduced_gradient", otherwise=Read("weight_gradient")),
    Read("island_sum", at=between_islands),
    Read("input_inverse", at=_inverses(0)),
    Read("output_inverse", at=_inverses(1)),
)
PRECONDITION = KINDS.register(
    Kind(
        name="precondition",
        symbol="PC",
        stream="compute",
        reads=_MULTIPLIED,
        writes=("preconditioned",),
        tensor_reduced=True,
    )
)
# Where ranks share a gradient, each multiplies what begins in its range. Parameters across borders move. It
# computes, because the tensor ranks of a replica exchange on that stream.
PRECONDITION_SHARDS = KINDS.register(
    Kind(
        name="precondition_shards",
        symbol="PZ",
        stream="compute",
        reads=_MULTIPLIED,
        writes=("preconditioned",),
        collective=True,
    )
)

USES = (
    AddedUses(kinds=("forward",), writes=(Use("linear_inputs", at=captured),)),
    AddedUses(kinds=("backward", "backward_input"), writes=(Use("linear_gradients", at=captured),)),
    AddedUses(kinds=("step", "whole_matrices"), reads=(Read("preconditioned", at=treated),)),
    AddedUses(kinds=("norm",), reads=(Read("preconditioned", at=treated_on_rank),)),
    # It runs the first part of a step.
    AddedUses(kinds=("tensor_norms",), reads=(Read("preconditioned", at=first(treated)),)),
)
