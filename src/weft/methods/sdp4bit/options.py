"""The options of SDP4Bit: keys of `[sync]`, and options of a plan's `sync`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weft.describe.job import Job
from weft.describe.plan import Plan
from weft.describe.synchronisation import SyncMethod, Wire, options_in
from weft.describe.toml_table import Count, TomlTable
from weft.errors import InputError, Violation
from weft.methods.sharding.neighbours import replicas_per_node
from weft.predict.cost.memory import plan_states

NAME = "sdp4bit"
Bits = Annotated[int, Field(ge=2, le=8)]
SCALE_BITS = 32
# Gradients in one Hadamard transform.
SMOOTHED = 32


class Sdp4BitOptions(TomlTable):
    """The further keys of `[sync]` under `method = "sdp4bit"`."""

    weights: Literal["difference", "direct", "whole"] = Field(
        default="difference",
        description="what replicas send of stepped weights: their quantised change, themselves quantised, or "
        "themselves",
    )
    weight_bits: Bits = Field(default=4, description="of a sent weight")
    weight_group: Count = Field(default=2048, description="weights with one scale")
    gradients: Literal["quantised", "whole"] = Field(
        default="quantised", description="whether replicas quantise the gradients that they send"
    )
    gradient_bits: Bits = Field(default=4, description="of a gradient sent between nodes")
    inside_bits: Bits = Field(default=8, description="of a gradient sent inside a node")
    gradient_group: Count = Field(default=128, description="gradients with one scale")
    smooth: bool = Field(
        default=True, description="whether a Hadamard transform of 32 gradients precedes quantising"
    )
    slices: Count = Field(
        default=1,
        description="parts of a gradient, of which one crosses between nodes while the next is summed inside",
    )
    replicas_per_node: Count = Field(
        default=1, description="replicas that add up gradients inside their node first; of the cluster"
    )

    @model_validator(mode="after")
    def _whole_blocks(self) -> Sdp4BitOptions:
        if self.smooth and self.gradient_group % SMOOTHED:
            problem = f"{self.gradient_group}; smoothing transforms {SMOOTHED} gradients at a time"
            near = SMOOTHED * max(1, round(self.gradient_group / SMOOTHED))
            raise InputError(Violation("gradient_group", problem, str(near)))
        return self

    def has_two_levels(self, replicas: int) -> bool:
        """Return True if so many replicas add up gradients inside nodes before they send them to others."""
        return self.gradients == "quantised" and 1 < self.replicas_per_node < replicas

    def last_bits(self, replicas: int) -> int:
        """Return the bits of a gradient in the only or last reduction of so many replicas."""
        return self.inside_bits if self.replicas_per_node == replicas else self.gradient_bits


def sent_share(bits: int, group: int, element_bytes: int) -> float:
    """Return bytes sent per byte of elements: their bits, and a scale for each group."""
    return (bits + SCALE_BITS / group) / (8 * element_bytes)


def inside_wire(plan: Plan) -> Wire:
    """Return the communication and computation of a plan's sums inside nodes.

    A rank encodes its whole gradient and decodes as much. It then encodes the sums that it sends on.
    """
    options, element = options_in(plan, NAME, Sdp4BitOptions), plan_states(plan).gradients
    assert options is not None, "only SDP4Bit has these sums"
    share = sent_share(options.inside_bits, options.gradient_group, element)
    encoded = (1 + 1 / options.replicas_per_node) / element
    return Wire(inside=share, encoded=encoded, decoded=1 / element)


def _wire(options: Sdp4BitOptions, plan: Plan) -> Wire:
    if options.gradients == "whole":
        return Wire()
    replicas, element = len(plan.stages[0].replicas), plan_states(plan).gradients
    share = sent_share(options.last_bits(replicas), options.gradient_group, element)
    if options.has_two_levels(replicas):
        return Wire(inside=0.0, between=share, decoded=1 / (options.replicas_per_node * element))
    return Wire(inside=share, between=share, encoded=1 / element, decoded=1 / element)


def _gathered(options: Sdp4BitOptions, plan: Plan) -> Wire:
    if options.weights == "whole":
        return Wire()
    share = sent_share(options.weight_bits, options.weight_group, plan.element_bytes)
    encoded = 1 / (len(plan.stages[0].replicas) * plan.element_bytes)
    return Wire(inside=share, between=share, encoded=encoded, decoded=1 / plan.element_bytes)


def keeps_apart(plan: Plan) -> bool:
    """Return True if ranks keep the weights that they step apart from those that all replicas have."""
    options = options_in(plan, NAME, Sdp4BitOptions)
    return options is not None and options.weights != "whole" and plan.sharding in ("zero-1", "zero-2")


def _proposals(job: Job) -> list[Mapping[str, Any]]:
    """Return 4 and 8 bits, with changes of weights or whole weights; layouts refuse the changes in zero-3."""
    return [
        {},
        {"weights": "whole"},
        {"gradient_bits": 8, "weight_bits": 8},
        {"gradient_bits": 8, "weights": "whole"},
    ]


SYNC = SyncMethod(
    name=NAME,
    table=Sdp4BitOptions,
    wire=_wire,
    gathered=_gathered,
    logged=lambda options: options.weights != "whole",
    derived={"replicas_per_node": replicas_per_node},
    proposals=_proposals,
)
