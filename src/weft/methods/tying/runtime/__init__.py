"""The runtime of tied weights: whole copies, shards of copies, and the sums of their gradients."""

from __future__ import annotations

from weft.methods.tying.program import NAME
from weft.methods.tying.runtime.state import TiedState, reduce_tied
from weft.run.methods import HandlerOf, StateOf

PARTS = (HandlerOf(kind="reduce_tied", handler=reduce_tied), StateOf(method=NAME, make=TiedState))
