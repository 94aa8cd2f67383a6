"""The meetings of CSER: blocks, other compressors, and the forms of the paper, its code and its baseline."""

from __future__ import annotations

from weft.methods.cser.options import NAME
from weft.methods.cser.runtime.replicas import CserReplicas, meet, rejoin
from weft.run.methods import HandlerOf, StateOf
from weft.sync.base import SynchroniserOf
from weft.sync.dense import Dense

PARTS = (
    HandlerOf(kind="synchronise_update", handler=meet),
    HandlerOf(kind="rejoin", handler=rejoin),
    HandlerOf(kind="reset_error", handler=meet),
    StateOf(method=NAME, make=CserReplicas),
    # Within a replica, gradients are summed as they are.
    SynchroniserOf(name=NAME, make=lambda options: Dense()),
)
