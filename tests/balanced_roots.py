"""A method whose roots have late coefficients: a penalty on a mean over all micro-batches.

The loss has W / 2 (mean of r)^2 more, where r is the mean square of what one layer gives for a micro-batch.
The gradient of r is W (mean of r) / (micro-batches), which is known after all forward passes of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from installing import forget_installed

from weft.bundles import Bundle, bundles
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, KINDS, AddedUses, Kind, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.insert import insert
from weft.program.places import Places
from weft.program.program import NONE, Columns, Edges, Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, Use, ValueKind
from weft.run.handlers.base import Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.stage.roots import Root
from weft.run.streams import Completion, Stream, Value

NAME = "balance"
WEIGHT = 3.0
ROOT, COEFFICIENT = "balance_root", "balance_coefficient"
STARTS = (BACKWARD, BACKWARD_INPUT)


def balanced(layer: int) -> Choice:
    return Choice(name=NAME, options={"layer": layer})


@dataclass(frozen=True, kw_only=True)
class Balances(Owed):
    """The penalty of one layer, in this stage."""

    stage: int
    layer: int


def options(plan: Plan, graph: LayerGraph) -> Balances | None:
    choice = plan.method(NAME)
    if choice is None:
        return None
    layer = int(choice.options["layer"])
    stage = next(index for index, stage in enumerate(plan.stages) if layer in stage.layers)
    return Balances(stage=stage, layer=layer)


def balance(pipeline: LoweredPipeline, layout: PipelineLayout, owed: Balances) -> LoweredPipeline:
    """One row behind the stage's last forward pass, before its backward passes start."""
    columns = pipeline.columns
    forwards = np.flatnonzero((columns.kind == FORWARD) & (columns.stage == owed.stage))
    starts = np.flatnonzero(is_any_of(columns.kind, STARTS) & (columns.stage == owed.stage))
    last = forwards[-1:]
    row = len(columns)
    added = Columns.of(
        1,
        kind=KINDS.code(NAME),
        stage=owed.stage,
        replica=columns.replica[last],
        rank=columns.rank[last],
    )
    edges = [
        Edges.of(forwards, np.full(len(forwards), row)),
        Edges.of(np.full(len(starts), row), starts),
    ]
    return insert(pipeline, added, last, np.array([1]), Edges.join(edges))


def here(program: Program, rows: Ints) -> Places:
    owed = program.obligations.methods.get(NAME)
    stage = owed.stage if isinstance(owed, Balances) else NONE - 1
    return Places(rows[program.columns.stage[rows] == stage])


class BalanceState(MethodState):
    def __init__(self, making: Making) -> None:
        self.owed, self.micro_batches = making.program.obligations.methods[NAME], making.program.micro_batches

    def roots(self, stage: int) -> Sequence[Root]:
        if stage != self.owed.stage:
            return ()
        root = Root(
            layer=self.owed.layer,
            make=lambda now, output, targets: (output**2).mean(),
            coefficient=lambda workspace, now: workspace.values[COEFFICIENT, stage, NONE],
            left_as=ROOT,
        )
        return (root,)


def handle(workspace: Any, instruction: Any) -> Issue:
    stage, count = instruction.stage, workspace.resources.methods[NAME].micro_batches

    def issue(stream: Stream) -> Completion:
        roots = [workspace.values.pop((ROOT, stage, number)) for number in range(count)]
        value = workspace.values[COEFFICIENT, stage, NONE] = Value()

        def work() -> None:
            value.content = WEIGHT * torch.stack([one.content for one in roots]).mean() / count

        value.completion = stream.run(str(instruction), work, *roots)
        return value.completion

    return issue


PARTS = (HandlerOf(kind=NAME, handler=handle), StateOf(method=NAME, make=BalanceState))
USES = (
    AddedUses(kinds=("forward",), writes=(Use("balance_share", at=here),)),
    AddedUses(kinds=("backward", "backward_input"), reads=(Read(COEFFICIENT, at=here),)),
)
BUNDLE = Bundle(
    name=NAME,
    parts=(Pass(name=NAME, options=options, apply=balance, owes=lambda layout, owed: owed), *USES),
    runtime="balanced_roots",
)


@contextmanager
def in_use() -> Iterator[Mapping[str, Bundle]]:
    """The method is installed within this block, and its kind and values are known."""
    bundles()
    kinds, codes, values = list(KINDS._kinds), dict(KINDS._codes), dict(VALUES._values)
    VALUES.register(ValueKind(name="balance_share", scope=PER_STAGE, until="freed", accumulates=True))
    VALUES.register(ValueKind(name=COEFFICIENT, scope=PER_STAGE, until="read"))
    KINDS.register(
        Kind(
            name=NAME,
            symbol="L",
            # Beside the computations, so that what it makes is late.
            stream="collective",
            reads=(Read("balance_share", consumes=True),),
            writes=(COEFFICIENT,),
        )
    )
    forget_installed()
    try:
        with patch("weft.bundles.others", lambda: (BUNDLE,)):
            yield {NAME: BUNDLE}
    finally:
        KINDS._kinds[:], KINDS._codes, VALUES._values = kinds, codes, values
        forget_installed()
