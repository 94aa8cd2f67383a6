"""The rules of CSER, and the move to it: several replicas, and losses of one scale."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import SCALED
from weft.methods.cser.options import NAME, CserOptions
from weft.methods.local_averaging.program import NOBODY
from weft.methods.local_averaging.rules import SCALES
from weft.moves.synchronisation import Replication, SyncChoice, SyncRefusal


def _refuse(options: CserOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.precision in SCALED:
        return SyncRefusal(SCALES, "precision", "bf16")
    return None


_CHOICE = SyncChoice(method=NAME, table=CserOptions, refuse=_refuse, moved_options={"ratio": 32.0})

RULES = _CHOICE.rules(other="one replica, fp16", reason=f"{NOBODY}; {SCALES}")
MOVES = (
    _CHOICE.move(
        name="reset errors",
        contract=Contract.EMPIRICAL,
        summary="Replicas apply whole updates, average a few blocks of them, and of errors at resets.",
        source="Xie et al., CSER, arXiv 2007.13221",
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
    ),
)
