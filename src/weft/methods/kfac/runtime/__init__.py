"""K-FAC on one rank: its instructions, and its state from step to step."""

from __future__ import annotations

from functools import partial

from weft.methods.kfac.options import NAME
from weft.methods.kfac.runtime.handlers import (
    curvature,
    inverse,
    precondition,
    precondition_shards,
    reduced_curvature,
)
from weft.methods.kfac.runtime.state import Kfac
from weft.run.methods import HandlerOf, StateOf

PARTS = (
    *(
        part
        for side, word in enumerate(("input", "output"))
        for part in (
            HandlerOf(kind=f"{word}_curvature", handler=partial(curvature, side=side)),
            HandlerOf(kind=f"reduce_{word}_curvature", handler=partial(reduced_curvature, side=side)),
            HandlerOf(kind=f"invert_{word}_curvature", handler=partial(inverse, side=side)),
        )
    ),
    HandlerOf(kind="precondition", handler=precondition),
    HandlerOf(kind="precondition_shards", handler=precondition_shards),
    StateOf(method=NAME, make=Kfac),
)
