"""The rules of PowerSGD, and the move to it: replicas with whole gradients of constant scale."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.plan import SCALED
from weft.methods.power_sgd.options import NAME, PowerSgdOptions
from weft.moves.synchronisation import NOBODY, Replication, SyncChoice, SyncRefusal

WHOLE = "every replica keeps an error as large as its whole gradients, which {} shards"
ISLANDS = "factors of a shard differ from those of the matrix"
UNEQUAL = "devices of several kinds round the factors differently, and replicas would drift apart"
SCALE = "errors have the scale of earlier losses, and {} changes it"


def _refuse(options: PowerSgdOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.sharding in ("zero-2", "zero-3"):
        return SyncRefusal(WHOLE.format(of.sharding), "sharding", "zero-1")
    if of.island is not None:
        return SyncRefusal(ISLANDS, "island", "none")
    if of.device_kinds > 1 and of.sharding == "zero-0":
        # With sharded states, one rank steps each weight and sends it to the others.
        return SyncRefusal(UNEQUAL, "sharding", "zero-1")
    if of.precision in SCALED:
        return SyncRefusal(SCALE.format(of.precision), "precision", "bf16")
    return None


_CHOICE = SyncChoice(method=NAME, table=PowerSgdOptions, refuse=_refuse)

RULES = _CHOICE.rules(
    other="one replica, zero-2, zero-3, islands, unequal devices with zero-0, fp16",
    reason=f"{NOBODY}; {WHOLE.format('zero-2')}; {ISLANDS}; {UNEQUAL}; {SCALE.format('fp16')}",
)
MOVES = (
    _CHOICE.move(
        name="send low-rank factors",
        contract=Contract.EMPIRICAL,
        summary="Replicas send two low-rank factors of each matrix of their gradients, and keep the rest.",
        source="Vogels et al., PowerSGD, arXiv 1905.13727",
        verify="weights equal those of one process that factors the same gradients (bit for bit)",
    ),
)
