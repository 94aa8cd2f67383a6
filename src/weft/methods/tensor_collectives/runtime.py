"""The exchanges of tensor ranks at the borders between segments."""

from __future__ import annotations

from weft.methods.tensor_collectives.program import NAME
from weft.run.handlers.segments import cross_backward, cross_forward
from weft.run.methods import HandlerOf
from weft.run.stage.pieces import CutOf
from weft.run.stage.tensor_pieces import TensorCut

PARTS = (
    CutOf(method=NAME, cut=TensorCut.of),
    HandlerOf(kind="tensor_forward", handler=cross_forward),
    HandlerOf(kind="tensor_backward", handler=cross_backward),
)
