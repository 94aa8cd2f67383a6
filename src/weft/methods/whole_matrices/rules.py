"""The rules of whole matrices for layouts: a model with blocks, whole matrices, states that stay."""

from __future__ import annotations

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice
from weft.describe.synchronisation import keeps_gradients_local
from weft.methods.offload.options import offloaded
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of, sharers_of
from weft.predict.cost.hidden_matrices import BLOCK

NO_BLOCKS = "muon orthogonalises matrices of blocks, and the model has none"
STATES_STAY = "muon keeps other states for matrices than for other parameters, and offload counts them alike"


DRIFT = "devices of different kinds round products differently, so their replicas would drift apart"


def _drifts(job: Job, layout: Layout) -> str | None:
    kinds = {group.device.name for group in job.cluster.groups}
    if not job.optimizer.orthogonalisations or len(kinds) == 1:
        return None
    alone = replicas_of(layout) if layout.sharding == "zero-0" else replicas_of(layout) // sharers_of(layout)
    if alone * layout.cp * layout.ep == 1 or keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{DRIFT}; nearest sharding: zero-1 over all replicas"


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
    Composition(method="muon", other="replicas on different devices", reason=DRIFT, refuse=_drifts),
    Composition(method="muon", other="models without blocks", reason=NO_BLOCKS, refuse=_no_blocks),
    Composition(method="muon", other="states in host memory", reason=STATES_STAY, refuse=_states_leave),
)
