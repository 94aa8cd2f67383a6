"""The rules of SDP4Bit, and the move to it: replicas that shard their states, all of them together."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions
from weft.moves.synchronisation import NOBODY, Replication, SyncChoice, SyncRefusal

UNSHARED = "replicas that each step all weights tell each other no weights"
ISLANDS = "it has two levels of its own, and islands would add a third"
NOTHING_KEPT = "replicas keep no whole weights, to which a difference could be added"


def _refuse(options: Sdp4BitOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.sharding == "zero-0":
        return SyncRefusal(UNSHARED, "sharding", "zero-1")
    if of.island is not None:
        return SyncRefusal(ISLANDS, "island", "none")
    if of.sharding == "zero-3" and options.weights != "whole":
        return SyncRefusal(NOTHING_KEPT, "sync.weights", "whole")
    return None


_CHOICE = SyncChoice(method=NAME, table=Sdp4BitOptions, refuse=_refuse)

RULES = _CHOICE.rules(
    other="one replica, whole states, islands; weight differences with zero-3",
    reason=f"{NOBODY}; {UNSHARED}; {ISLANDS}; {NOTHING_KEPT}",
)
MOVES = (
    _CHOICE.move(
        name="send few bits",
        contract=Contract.EMPIRICAL,
        summary="Replicas quantise gradients and changes of weights to about 4 bits before they send them.",
        source="Jia et al., SDP4Bit, arXiv 2410.15526",
        verify="weights equal those of one process that quantises the same numbers (bit for bit)",
    ),
)
