"""Exchanges of sums over whole parameter tensors, between the parts of a step.

Layer-wise optimizers scale the update of each parameter tensor by norms: LAMB by those of the weights and the
update (You et al., arXiv 1904.00962). Where ranks step shards of a tensor, each adds up its own elements.
Then all ranks of the stage add up these sums. The norm of the update exists only inside the step. So a row
before the step runs its first part and the exchange; the step itself runs the rest. Each exchange is an
instruction, so that all ranks exchange in a proved order and predictions count it.

All replicas take part, even if each holds whole tensors. They all step with one result. So they stay equal
bit by bit, also on devices with different kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import keeps_gradients_local
from weft.methods.offload.kinds import STORE_STATES
from weft.methods.tensor_norms.kinds import NAME, TENSOR_NORMS, TakesTensorNorms
from weft.methods.tensor_norms.verify import check_exchanges
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, stage_groups
from weft.program.passes.before_steps import before_steps

# A sum of squares is an fp64 number. The graph of layers counts no tensors: a block of a transformer has 9
# (Llama) to 16 (BERT), and the latency of so few bytes decides anyway.
SUM_BYTES, TENSORS_PER_LAYER = 8, 12
# Passes that add to what a step follows, or change the order of computations.
AFTER = ("auxiliary-head", "expert-exchanges", "micro-batch-norms", "offload", "tensor-collectives")


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The numbers per tensor in each exchange of a step, and the layers of each stage.

    `local`: each replica steps, and exchanges, by itself.
    """

    numbers: tuple[int, ...]
    layers: tuple[int, ...]
    local: bool = False

    def meets(self, layout: PipelineLayout) -> bool:
        """Return True if several ranks hold a stage whose sums they exchange."""
        return len(layout.stages[0].replicas[0]) > 1 or (layout.replicas > 1 and not self.local)


def options(plan: Plan, graph: LayerGraph) -> Exchanged | None:
    numbers = plan.optimizer.whole_sums
    if not numbers:
        return None
    layers = tuple(len(stage.layers) for stage in plan.stages)
    return Exchanged(numbers, layers, keeps_gradients_local(plan.sync))


def exchange(pipeline: LoweredPipeline, layout: PipelineLayout, exchanged: Exchanged) -> LoweredPipeline:
    """Add the exchanges to one pipeline; the first one follows all that the step follows."""
    if not exchanged.meets(layout):
        return pipeline
    sizes = SUM_BYTES * TENSORS_PER_LAYER * np.outer(exchanged.layers, exchanged.numbers)
    return before_steps(pipeline, TENSOR_NORMS, sizes, used_up_by=STORE_STATES)


def groups(layout: PipelineLayout, exchanged: Exchanged) -> Sequence[GroupTable]:
    """Return all ranks of each stage, or those of each replica."""
    if not exchanged.meets(layout):
        return ()
    return (stage_groups((TENSOR_NORMS,), layout, apart=exchanged.local),)


def owes(layout: PipelineLayout, exchanged: Exchanged) -> TakesTensorNorms | None:
    if not exchanged.meets(layout):
        return None
    return TakesTensorNorms(exchanges=len(exchanged.numbers), local=exchanged.local)


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
