"""The rules of CLAN, and the move to it: replicas that each step all weights."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import SCALED
from weft.methods.clan.options import NAME, ClanOptions
from weft.moves.synchronisation import NOBODY, Replication, SyncChoice, SyncRefusal

SHARDED = "all replicas pull all gradients, and {} wants shares of them only"
SCALE = "errors have the scale of earlier losses, and {} changes it"


def _refuse(options: ClanOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.sharding != "zero-0":
        return SyncRefusal(SHARDED.format(of.sharding), "sharding", "zero-0")
    if options.keeps_errors and of.precision in SCALED:
        return SyncRefusal(SCALE.format(of.precision), "precision", "bf16")
    return None


_CHOICE = SyncChoice(method=NAME, table=ClanOptions, refuse=_refuse)

RULES = _CHOICE.rules(
    other="one replica, sharded states, fp16 with errors",
    reason=f"{NOBODY}; {SHARDED.format('zero-1')}; {SCALE.format('fp16')}",
)
MOVES = (
    _CHOICE.move(
        name="compress both ways",
        contract=Contract.EMPIRICAL,
        summary="Replicas encode gradients, owners add them up and encode the sums; both keep their errors.",
        source="Zhong et al., CLAN, arXiv 2105.07829",
        verify="weights equal those of one process that encodes the same numbers (bit for bit)",
    ),
)
