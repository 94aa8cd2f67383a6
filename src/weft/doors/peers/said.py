"""What peers are asked about a plan, and what they say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan

# What tensor ranks do with the tokens between divided products: each has all of them; each has a share, and
# the gathered ones are kept for backward; the same, and backward gathers them again.
Stream = Literal["whole", "kept", "gathered again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan of a model on a cluster; `stream` None: as weft's own runtime divides the tokens."""

    model: ModelConfig
    graph: LayerGraph
    cluster: Cluster
    plan: Plan
    stream: Stream | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A peer's answer about one plan.

    Attributes:
        step_s: seconds of a step, None where the peer cannot say the plan.
        peak_bytes: of the fullest device.
        breakdown: seconds of the step by cause; they add up to the step.
        approximated: what of the plan the peer does not know, and what it takes in its place.
        reason: why it cannot say the plan, empty where it can.
    """

    step_s: float | None = None
    peak_bytes: int | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    approximated: tuple[str, ...] = ()
    reason: str = ""
