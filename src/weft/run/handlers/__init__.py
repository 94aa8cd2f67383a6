"""The handlers of instructions: computations and messages here, all other kinds in their methods."""

from __future__ import annotations

from collections.abc import Mapping

from weft.run.handlers.base import Handler
from weft.run.handlers.messages import receive_activation, receive_gradient, send_activation, send_gradient
from weft.run.handlers.passes import backward, backward_input, backward_weight, forward
from weft.run.handlers.segments import (
    backward_segment,
    first_backward_segment,
    forward_segment,
    input_segment,
    last_forward_segment,
    last_input_segment,
    weight_segment,
    whole_or_cut,
)
from weft.run.handlers.step import step

HANDLERS: Mapping[str, Handler] = {
    "forward": whole_or_cut(forward, last_forward_segment),
    "backward": whole_or_cut(backward, first_backward_segment),
    "backward_input": whole_or_cut(backward_input, last_input_segment),
    "backward_weight": backward_weight,
    "send_activation": send_activation,
    "send_gradient": send_gradient,
    "receive_activation": receive_activation,
    "receive_gradient": receive_gradient,
    "forward_segment": forward_segment,
    "backward_segment": backward_segment,
    "input_segment": input_segment,
    "weight_segment": weight_segment,
    "step": step,
}
