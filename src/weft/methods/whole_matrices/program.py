"""Exchanges of matrices between the two parts of a step.

Muon makes the update of each matrix from the whole matrix. Ranks that share a stage own equal ranges of its
flat tensors, so most matrices lie in one range. Only those that cross a border move. The rank with the first
element gets the other pieces, makes the update, and sends its pieces back. So each rank makes its share of
the updates, and sends less than one matrix each way. The direction exists only inside the step. So a row
before the step runs its first part, the exchange and the products. The step itself moves the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.offload.kinds import STORE_STATES
from weft.methods.sharding.groups import group_tables
from weft.methods.tensor_norms.program import AFTER
from weft.methods.whole_matrices.kinds import NAME, WHOLE_MATRICES, CompletesMatrices
from weft.methods.whole_matrices.verify import check_exchanges
from weft.predict.cost.hidden_matrices import hidden_matrices
from weft.predict.cost.memory import STEPPED_BYTES
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.before_steps import before_steps


@dataclass(frozen=True, slots=True)
class Completed:
    """The bytes of the largest matrix of each stage, and the replicas that share a stage; None: all."""

    largest: tuple[int, ...]
    sharers: int | None = None


def options(plan: Plan, graph: LayerGraph) -> Completed | None:
    if not plan.optimizer.orthogonalisations or plan.sharding == "zero-0":
        return None
    sizes = [
        [
            round(one.rows * one.columns)
            for layer in stage.layers
            for one in hidden_matrices(graph.layers[layer], plan.shape(index))
        ]
        for index, stage in enumerate(plan.stages)
    ]
    element = STEPPED_BYTES[plan.precision]
    return Completed(tuple(element * max(each, default=0) for each in sizes), plan.island)


def exchange(pipeline: LoweredPipeline, layout: PipelineLayout, completed: Completed) -> LoweredPipeline:
    """Add the exchange before each step of one pipeline."""
    if layout.replicas == 1:
        return pipeline
    # A piece goes to the rank that completes it, and comes back.
    sizes = 2 * np.array(completed.largest, dtype=np.int64).reshape(-1, 1)
    return before_steps(pipeline, WHOLE_MATRICES, sizes, used_up_by=STORE_STATES)


def groups(layout: PipelineLayout, completed: Completed) -> Sequence[GroupTable]:
    """Return the groups of ranks that share the same weights."""
    if layout.replicas == 1:
        return ()
    shared, _ = group_tables(layout, completed.sharers or layout.replicas)
    return (replace(shared, kinds=(WHOLE_MATRICES,)),)


def owes(layout: PipelineLayout, completed: Completed) -> CompletesMatrices | None:
    return None if layout.replicas == 1 else CompletesMatrices()


PASS = Pass(
    name=NAME,
    options=options,
    apply=exchange,
    after=AFTER,
    last=True,
    groups=groups,
    owes=owes,
    check=check_exchanges,
)
