"""The rules of whole matrices for layouts: a model with blocks, whole matrices, states that stay."""

from __future__ import annotations

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.methods.offload.options import offloaded
from weft.moves.composition import Composition
from weft.predict.cost.hidden_matrices import BLOCK

NO_BLOCKS = "muon orthogonalises matrices of blocks, and the model has none"
STATES_STAY = "muon keeps other states for matrices than for other parameters, and offload counts them alike"


def _no_blocks(job: Job, layout: Layout) -> str | None:
    if not job.optimizer.orthogonalisations or any(one.kind == BLOCK for one in job.graph.layers):
        return None
    return f"{NO_BLOCKS}; nearest optimizer: adamw"


def _states_leave(job: Job, layout: Layout) -> str | None:
    if not job.optimizer.other_states:
        return None
    leave = offloaded(layout.methods_beside(job.methods), layout.stages).states
    return f"{STATES_STAY}; nearest offload.states: false" if leave else None


RULES = (
    Composition(method="muon", other="models without blocks", reason=NO_BLOCKS, refuse=_no_blocks),
    Composition(method="muon", other="states in host memory", reason=STATES_STAY, refuse=_states_leave),
)
