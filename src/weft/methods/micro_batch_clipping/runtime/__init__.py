"""Micro-batch clipping on one rank: its instructions, and its state from step to step."""

from __future__ import annotations

from weft.methods.micro_batch_clipping.options import NAME
from weft.methods.micro_batch_clipping.runtime.handlers import bound_gradient, clip_gradient, take_gradient
from weft.methods.micro_batch_clipping.runtime.state import MicroBatchClipping
from weft.run.methods import HandlerOf, StateOf

PARTS = (
    HandlerOf(kind="take_gradient", handler=take_gradient),
    HandlerOf(kind="clip_gradient", handler=clip_gradient),
    HandlerOf(kind="bound_gradient", handler=bound_gradient),
    HandlerOf(kind="clip_stage_gradient", handler=clip_gradient),
    HandlerOf(kind="bound_stage_gradient", handler=bound_gradient),
    StateOf(method=NAME, make=MicroBatchClipping),
)
