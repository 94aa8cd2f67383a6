"""The messages of CSER's meetings, and their bytes and passes over the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.describe.amount import Shape
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import SyncMethod, Wire
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.options import NAME, CserOptions
from weft.predict.cost.memory import gradient_element_bytes, own_parameters, shared_parameters

# Numbers with one scale in a message of signs.
SCALED = 4096
# Bytes of the place of a number that one replica chose, and of a scale.
PLACE_BYTES = SCALE_BYTES = 4
# Weights and gradients are checked in each step; the sent part is copied out, added up and copied back.
_PASSES, _SENT_PASSES = 2.0, 6.0
# An error and the weights before a step are read and written.
_EXPLICIT_PASSES = 8.0


class MeetingBytes(NamedTuple):
    """The bytes of one stage's collective in each step, at a return, and at each reset; 0: there is none."""

    update: int
    rejoin: int
    reset: int


def part_sizes(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> list[int]:
    """Return the numbers of a stage's parts on one tensor rank: its own weights, and each shared one."""
    shared = [round(one.parameters(shape)) for one in shared_parameters(graph, layers)]
    return [size for size in (own_parameters(graph, layers, shape), *shared) if size]


def kept_of(numbers: int, ratio: float) -> int:
    """Return how many of the largest numbers a replica sends."""
    return max(round(numbers / ratio), 1)


def message_bytes(options: CserOptions, numbers: int, ratio: float, element: int) -> int:
    """Return the bytes of one replica's message for a part of `numbers` weights of `element` bytes."""
    if options.compressor == "sign":
        return -(-numbers // 8) + SCALE_BYTES * -(-numbers // SCALED)
    if options.compressor == "top-k":
        return kept_of(numbers, ratio) * (element + PLACE_BYTES)
    blocks = Blocks.of(numbers, options.ratios.largest, options.block)
    return min(blocks.kept(ratio) * blocks.length, numbers) * element


def stage_bytes(options: CserOptions, plan: Plan, graph: LayerGraph, stage: int) -> MeetingBytes:
    """Return the bytes of a stage's collectives.

    An all-reduce of blocks has the bytes of one message, an all-gather of other parts those of all messages.
    """
    ratios, element = options.ratios, gradient_element_bytes(plan)
    sizes = part_sizes(graph, plan.stages[stage].layers, plan.shape(stage))
    messages = 1 if options.compressor == "blocks" else len(plan.stages[stage].replicas)

    def of(ratio: float | None) -> int:
        if ratio is None:
            return 0
        return messages * sum(message_bytes(options, size, ratio, element) for size in sizes)

    return MeetingBytes(of(ratios.update), element * sum(sizes), of(ratios.reset))


def _wire(options: CserOptions, plan: Plan) -> Wire:
    least = min(ratio for ratio in options.ratios[:2] if ratio is not None)
    return Wire(passes=_PASSES + _EXPLICIT_PASSES * options.explicit + _SENT_PASSES / least)


def _kept(options: CserOptions, replicas: int) -> float:
    """Return the kept numbers for each weight: error and former weights, or the sent part before a step."""
    if options.explicit:
        return 2.0
    update = options.ratios.update
    return 1.0 / update if options.variant == "paper" and update is not None else 0.0


def _indispensable(options: CserOptions) -> str | None:
    if options.variant != "paper" or not options.explicit:
        return "replicas keep no errors, without which none comes back; set sync.keep_errors"
    return "sync.absent states who is absent; leave one of them out" if options.absent else None


def _proposals(job: Job) -> Sequence[Mapping[str, Any]]:
    """Return the smaller two of the paper's totals; a cycle of more steps would take long to simulate."""
    return [{"every": every, "ratio": ratio} for every, ratio in ((16, 32.0), (32, 256.0))]


SYNC = SyncMethod(
    name=NAME,
    table=CserOptions,
    local_gradients=True,
    wire=_wire,
    kept=_kept,
    proposals=_proposals,
    indispensable=_indispensable,
)
