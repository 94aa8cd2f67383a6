"""The averaging of a stage's weights over its replicas, and the means that stand for differing replicas."""

from __future__ import annotations

from weft.methods.local_averaging.options import NAME
from weft.methods.local_averaging.runtime.local_steps import LocalAveraging, average_weights
from weft.methods.local_averaging.runtime.outer_step import Averaging
from weft.run.methods import HandlerOf, StateOf
from weft.sync.base import SynchroniserOf

PARTS = (
    HandlerOf(kind="average_weights", handler=average_weights),
    StateOf(method=NAME, make=LocalAveraging),
    SynchroniserOf(name=NAME, make=lambda options: Averaging()),
)
