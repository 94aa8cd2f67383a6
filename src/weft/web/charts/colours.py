"""One colour per kind of instruction, the same in reports, SVG pictures and terminals.

Kinds on the compute stream have a contrast of at least 4.5 to their white labels. Kinds of messages are muted
and have no labels. All of them stand out from white and from nearly black pages.
"""

from __future__ import annotations

from weft.program.kinds import name_hash

_KNOWN = {
    "forward": "#2b6cd4",
    "backward": "#1a7f55",
    "backward_input": "#14807c",
    "backward_weight": "#5a7d1f",
    "send_activation": "#5d83b8",
    "receive_activation": "#7d8fa8",
    "send_gradient": "#5b9a80",
    "receive_gradient": "#82998f",
    "gather": "#b0578d",
    "free": "#8a8f98",
    "reduce": "#b8473d",
    "reduce_across": "#a3493a",
    "reduce_tied": "#8a2f5b",
    "norm": "#6d4a8a",
    "step": "#7a4fc0",
}
# Kinds registered by third parties take one of these colours, chosen by a hash of their name.
_OTHERS = ("#a85a14", "#8c6d1f", "#a0468f", "#4a6fa5", "#7d5a4f", "#3f7d8c")

_DARKEST = 0.34


def kind_colour(kind: str) -> str:
    """Return the colour of a kind's name, as ``#rrggbb``."""
    return _KNOWN.get(kind, _OTHERS[name_hash(kind) % len(_OTHERS)])


def shaded(colour: str, shade: float) -> str:
    """Return `colour` mixed with black; `shade` goes from 0 (unchanged) to 1 (34 % black)."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel * (1 - _DARKEST * shade)):02x}" for channel in channels)
