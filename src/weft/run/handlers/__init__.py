"""How each kind of instruction is executed: a registry, open to new kinds."""

from __future__ import annotations

from collections.abc import Mapping

from weft.run.handlers.base import Handler
from weft.run.handlers.collectives import free, gather, norm, reduce, reduce_across, reduce_tied, step
from weft.run.handlers.messages import receive_activation, receive_gradient, send_activation, send_gradient
from weft.run.handlers.passes import backward, backward_input, backward_weight, forward

HANDLERS: Mapping[str, Handler] = {
    "forward": forward,
    "backward": backward,
    "backward_input": backward_input,
    "backward_weight": backward_weight,
    "send_activation": send_activation,
    "send_gradient": send_gradient,
    "receive_activation": receive_activation,
    "receive_gradient": receive_gradient,
    "gather": gather,
    "free": free,
    "reduce": reduce,
    "reduce_across": reduce_across,
    "reduce_tied": reduce_tied,
    "norm": norm,
    "step": step,
}
