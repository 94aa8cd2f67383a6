"""How each kind of instruction is executed: computations and messages here, the rest by its method."""

from __future__ import annotations

from collections.abc import Mapping

from weft.run.handlers.base import Handler
from weft.run.handlers.messages import receive_activation, receive_gradient, send_activation, send_gradient
from weft.run.handlers.passes import backward, backward_input, backward_weight, forward
from weft.run.handlers.step import step

HANDLERS: Mapping[str, Handler] = {
    "forward": forward,
    "backward": backward,
    "backward_input": backward_input,
    "backward_weight": backward_weight,
    "send_activation": send_activation,
    "send_gradient": send_gradient,
    "receive_activation": receive_activation,
    "receive_gradient": receive_gradient,
    "step": step,
}
