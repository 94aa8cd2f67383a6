"""Evaluation in bubbles on one rank: its instructions, and its state from step to step."""

from __future__ import annotations

from weft.methods.evaluate.runtime.handlers import (
    copy_weights,
    held_out_forward,
    receive_held_out,
    send_held_out,
)
from weft.methods.evaluate.runtime.state import BubbleEvaluation
from weft.methods.evaluate.sizes import NAME
from weft.run.methods import HandlerOf, StateOf

PARTS = (
    HandlerOf(kind="copy_weights", handler=copy_weights),
    HandlerOf(kind="held_out_forward", handler=held_out_forward),
    HandlerOf(kind="send_held_out", handler=send_held_out),
    HandlerOf(kind="receive_held_out", handler=receive_held_out),
    StateOf(method=NAME, make=BubbleEvaluation),
)
