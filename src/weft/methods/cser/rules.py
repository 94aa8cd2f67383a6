"""The rules of CSER, and the move to it: several replicas, losses of one scale, and enough blocks."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import SCALED, Plan
from weft.describe.plan_file import PlanRule
from weft.describe.synchronisation import options_in
from weft.errors import InputError, Violation
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.options import NAME, CserOptions
from weft.methods.cser.traffic import part_sizes
from weft.methods.local_averaging.program import NOBODY
from weft.methods.local_averaging.rules import SCALES
from weft.moves.synchronisation import Replication, SyncChoice, SyncRefusal


def _refuse(options: CserOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.precision in SCALED:
        return SyncRefusal(SCALES, "precision", "bf16")
    return None


def _too_few_blocks(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield a violation for the first part of a stage with fewer blocks than the ratio of a meeting."""
    try:
        options = options_in(plan, NAME, CserOptions)
    except InputError:
        # The other rule names what is wrong.
        return
    if options is None or options.compressor != "blocks":
        return
    ratio = options.ratios.largest
    for index, stage in enumerate(plan.stages):
        for size in part_sizes(graph, stage.layers, plan.shape(index)):
            blocks = Blocks.of(size, ratio, options.block)
            if not blocks.admit(ratio):
                problem = f"stage {index}: a ratio of {ratio:g} keeps none of {blocks.count} blocks"
                nearest = f"block {int(size / ratio)}" if size >= ratio else f"a ratio of {size}"
                yield Violation("plan: sync", f"{NAME}: {problem} of {blocks.length} numbers", nearest)
                return


_CHOICE = SyncChoice(method=NAME, table=CserOptions, refuse=_refuse, moved_options={"ratio": 32.0})

RULES = (
    *_CHOICE.rules(other="one replica, fp16", reason=f"{NOBODY}; {SCALES}"),
    PlanRule(refuse=_too_few_blocks),
)
MOVES = (
    _CHOICE.move(
        name="reset errors",
        contract=Contract.EMPIRICAL,
        summary="Replicas apply whole updates, average a few blocks of them, and of errors at resets.",
        source="Xie et al., CSER, arXiv 2007.13221",
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
    ),
)
