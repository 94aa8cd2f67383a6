"""Bytes of a rank: parameter states, activations kept for backward passes, buffers, slack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.plan import Buffers, Plan, Sharding, Stack
from weft.describe.synchronisation import AS_IT_IS, gather_wire_of, wire_of
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.buffers import SHARDED_BUFFERS

# From no sharded states to all.
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)

# Share of allocated bytes that a caching allocator loses to rounding and fragments.
ALLOCATOR_SLACK = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank holds between steps, by precision and optimizer.

    `reduced` are those of a gradient on its way to other replicas. `optimizer` covers masters and optimizer
    state; `moved` is the part that an update reads and writes.
    """

    weights: int
    gradients: int
    reduced: int
    optimizer: int
    moved: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def in_turn(self) -> tuple[int, int, int]:
        """States in the order of sharding: a level shards the first `SHARDINGS.index(level)` of them."""
        return self.optimizer, self.gradients, self.weights

    @property
    def arriving(self) -> int:
        """Bytes of the room in which a gradient arrives; numbers of fewer bits do not make it smaller."""
        return max(self.gradients, self.reduced)

    @property
    def touched(self) -> int:
        """Bytes read and written by one update: it reads gradients, and reads and writes weights."""
        return self.gradients + 2 * self.weights + self.moved


# Bytes of a stepped parameter, and of its gradient. 16-bit training keeps an fp32 master copy and accumulates
# gradients in fp32: 18 bytes with AdamW, as in Korthikanti et al., arXiv 2205.05198.
STEPPED_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """Memory of a training program that its plan does not determine.

    Attributes:
        half_gradients: 16-bit training accumulates and reduces gradients in 16 bits, not in fp32.
        bucket_bytes: largest buffer of arriving gradients or weights; None: as large as a stage needs.
        shards_masters: gathered weights are cast masters, of which ranks keep shards and nothing else.
        spread: relative half-width of the 90 % interval of the buffers.
        source: the origin of the buffers' sizes, in words.
    """

    half_gradients: bool = False
    bucket_bytes: int | None = None
    shards_masters: bool = False
    spread: float = 0.01
    source: str = "counted by parameters"


# weft reduces a stage at once, out of place. Megatron-LM reduces in place, in fp32 (Korthikanti et al.).
# DeepSpeed keeps gradients as its paper (ZeRO) does, and reduces them in buckets of 5e8 elements. FSDP2
# (`torch.distributed.fsdp.fully_shard`) gathers the next layer while one computes. How much of its limits a
# program uses is assumed.
_ASSUMED_SPREAD = 0.2
STACKS: Mapping[Stack, StackMemory] = {
    "weft": StackMemory(),
    "megatron-lm": StackMemory(bucket_bytes=0, source="Megatron-LM reduces in place"),
    "deepspeed": StackMemory(
        half_gradients=True, bucket_bytes=10**9, spread=_ASSUMED_SPREAD, source="DeepSpeed's usual buckets"
    ),
    "fsdp2": StackMemory(
        shards_masters=True, spread=_ASSUMED_SPREAD, source="FSDP2 gathers two layers at a time"
    ),
}
STATED_BUFFERS = "bucket sizes of the file"


def state_bytes(
    precision: str,
    optimizer: OptimizerWork = ADAMW,
    *,
    stack: Stack = "weft",
    reduce_precision: str | None = None,
) -> StateBytes:
    """Return bytes per parameter; replicas reduce gradients as they are, or in `reduce_precision`.

    Raises:
        InputError: for a precision without training.
    """
    if precision not in STEPPED_BYTES:
        raise InputError(Violation("precision", f"{precision} is not one of {', '.join(STEPPED_BYTES)}"))
    weights, stepped = PRECISION_BYTES[precision], STEPPED_BYTES[precision]
    masters = stepped if stepped > weights else 0
    gradients = weights if STACKS[stack].half_gradients else stepped
    return StateBytes(
        weights=weights,
        gradients=gradients,
        reduced=gradients if reduce_precision is None else PRECISION_BYTES[reduce_precision],
        optimizer=masters + optimizer.kept_bytes(stepped),
        moved=2 * masters + optimizer.touched_bytes(stepped),
    )


def plan_states(plan: Plan) -> StateBytes:
    """Return bytes per parameter for the plan's precisions, optimizer and stack."""
    reduced = plan.reduce_precision
    return state_bytes(plan.precision, plan.optimizer, stack=plan.stack, reduce_precision=reduced)


class ResidentStates(NamedTuple):
    """Bytes that every rank holds all the time for its parameters, without slack; each of shape (ranks,).

    Optimizer states cover masters. Arriving gradients have a room of their own.
    """

    optimizer_states: Ints
    gradients: Ints
    weights: Ints
    arriving_gradients: Ints
    sharding_buffers: Ints

    @property
    def total(self) -> Ints:
        total: Ints = np.sum(self, axis=0)
        return total


# The kinds of `ResidentStates` whose sizes depend on the stack.
BUFFERS = ("arriving_gradients", "sharding_buffers")


def resident_states(
    stages: Iterable[tuple[Ints, int | Ints, int]],
    ranks: int,
    states: StateBytes,
    sharding: Sharding,
    *,
    stack: StackMemory = STACKS["weft"],
    stated: Buffers | None = None,
) -> ResidentStates:
    """Return bytes that every rank holds all the time in states and buffers.

    `stages` are (ranks that hold a stage, parameters of each or of all, replicas), in buffer order of a rank.
    These replicas reduce the stage's gradient together and shard its states. A rank with phi parameters and n
    replicas holds the following (Rajbhandari et al., ZeRO, arXiv 1910.02054; buffers after Lamy-Poirier,
    arXiv 2211.05953)

        zero-0  (w + g + o) phi            zero-1  (w + g) phi + o phi / n
        zero-2  w phi + (g + o) phi / n    zero-3  (w + g + o) phi / n

    and buffers: for gradients from zero-2 on, and for weights with zero-3. Each is as large as the largest
    stage that uses it. Where replicas reduce gradients, a further buffer holds arriving gradients. It is as
    large as the largest of them, or as a bucket of the `stack`. `stated` buffers take the place of all these.
    A stack allocates its buckets whole, and gathers no more weights than a rank has.
    """
    level, bucket_bytes = SHARDINGS.index(sharding), stack.bucket_bytes
    buffer_bytes = buffered_bytes(states, sharding, stack)
    whole, shares, arriving, local = (np.zeros(ranks, dtype=np.int64) for _ in range(4))
    buffers = np.zeros((ranks, SHARDED_BUFFERS), dtype=np.int64)
    for holders, parameters, replicas in stages:
        whole[holders] += parameters
        shares[holders] += -(-parameters // replicas)
        if replicas > 1:
            room = parameters * states.arriving
            room = room if bucket_bytes is None else np.minimum(room, bucket_bytes)
            arriving[holders] = np.maximum(arriving[holders], room)
        if buffer_bytes:
            used = local[holders] % SHARDED_BUFFERS
            buffered = parameters * buffer_bytes
            buffered = buffered if bucket_bytes is None else np.minimum(buffered, bucket_bytes)
            buffers[holders, used] = np.maximum(buffers[holders, used], buffered)
            local[holders] += 1
    optimizer, gradients, weights = (
        size * (shares if turn < level else whole) for turn, size in enumerate(states.in_turn)
    )
    if stack.shards_masters and sharding == "zero-3":
        weights = np.zeros_like(whole)
    in_use: Ints = buffers.sum(axis=1)
    if stated is not None:
        arriving = np.where(arriving > 0, stated.reduced * states.arriving, 0)
        in_use = np.minimum(whole, stated.gathered) * (states.weights if level else 0)
        if sharding != "zero-3":
            # Steps gather weights when reductions have left their buffers.
            in_use = np.maximum(in_use - arriving, 0)
    return ResidentStates(optimizer, gradients, weights, arriving, in_use)


def buffered_bytes(states: StateBytes, sharding: Sharding, stack: StackMemory = STACKS["weft"]) -> int:
    """Return bytes of each parameter in a buffer; optimizer states take none.

    Where masters are sharded, the gradient of a layer has the precision of its gathered weights.
    """
    level = SHARDINGS.index(sharding)
    return states.weights * max(0, level - 1) if stack.shards_masters else sum(states.in_turn[1:level])


def with_slack(held: Ints) -> Ints:
    """Return allocated bytes for `held` bytes, the allocator's slack included."""
    slack: Ints = np.rint(held * ALLOCATOR_SLACK).astype(np.int64)
    return held + slack


def gradient_element_bytes(plan: Plan) -> int:
    """Return bytes of one gradient element, as accumulated."""
    return plan_states(plan).gradients


def reduced_element_bytes(plan: Plan) -> int:
    """Return bytes of one gradient element, as replicas send it to each other."""
    return plan_states(plan).reduced


def stage_parameters(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> int:
    """Return the count of a stage's trained parameters on one tensor rank, with copies of tied ones."""
    parameters = graph.amounts("parameters", shape)
    own = sum(parameters[index] for index in layers)
    return round(own + sum(one.parameters(shape) for one in copied_parameters(graph, layers)))


def frozen_bytes(graph: LayerGraph, layers: Sequence[int], shape: Shape, element_bytes: int) -> int:
    """Return the bytes of a stage's frozen parameters on one tensor rank, with copies of tied ones."""
    each = graph.frozen_bytes(shape, element_bytes)
    own = sum(each[index] for index in layers)
    copied = sum(one.frozen(shape) for one in copied_parameters(graph, layers))
    return round(own + element_bytes * copied)


def own_parameters(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> int:
    """Return the count of a stage's trained parameters on one rank, without tied ones of other stages."""
    shared = [one.parameters(shape) for one in shared_parameters(graph, layers) if one.layers[0] in layers]
    parameters = graph.amounts("parameters", shape)
    return round(sum(parameters[layer] for layer in layers) - sum(shared))


def shards_copies(plan: Plan) -> bool:
    """Return True if replicas shard copies of tied weights with the rest of their stages.

    A rank's shards of two copies begin and end elsewhere. So copies stay whole where a result depends on
    these borders. It does if optimizers add up over whole tensors, or if replicas send compressed numbers.
    """
    plain = wire_of(plan) == gather_wire_of(plan) == AS_IT_IS
    return plan.sharding != "zero-0" and plain and not plan.optimizer.whole_sums


def reduced_parameters(plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the count of parameters with gradients that a rank reduces for a stage: without whole copies.

    Replicas of unlike tensor degrees reduce as many at once as a rank of the widest one has.
    """
    count = stage_parameters if shards_copies(plan) else own_parameters
    return count(graph, plan.stages[stage].layers, plan.shape_of_shards(stage))


def alike_parameters(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> int:
    """Return the count of those that all expert ranks have alike: all but the experts'."""
    own = own_parameters(graph, layers, shape)
    more = own_parameters(graph, layers, replace(shape, expert_parallel=1))
    divided = (more - own) // (shape.expert_parallel - 1) if shape.expert_parallel > 1 else 0
    return own - divided


def shared_parameters(graph: LayerGraph, layers: Sequence[int]) -> list[TiedParameters]:
    """Return the tied parameters that layers of a stage and of other stages use."""
    return [one for one in graph.tied if 0 < len(set(one.layers) & set(layers)) < len(one.layers)]


def copied_parameters(graph: LayerGraph, layers: Sequence[int]) -> list[TiedParameters]:
    """Return the `shared_parameters` that belong to another stage, so that this one has a copy."""
    return [one for one in shared_parameters(graph, layers) if one.layers[0] not in layers]


def waiting_gradients(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> dict[int, float]:
    """Return the elements of gradients that wait inside a backward pass, by the layer that makes them first.

    A pass adds up the gradients of a weight that several layers of the stage use. It is complete in the first
    of these layers, and begins in the last one.
    """
    inside = ((one, set(one.layers) & set(layers)) for one in graph.tied)
    return {max(users): one.parameters(shape) for one, users in inside if len(users) > 1}


def unshared_bytes(parameters: int, replicas: int, states: StateBytes, sharding: Sharding) -> int:
    """Return the bytes that a rank without sharding of `parameters` holds beyond `resident_states`."""
    return sum(states.in_turn[: SHARDINGS.index(sharding)]) * (parameters - -(-parameters // replicas))


def stage_kept_bytes(graph: LayerGraph, layers: Sequence[int], shape: Shape, precision: str) -> int:
    """Return bytes per rank that one micro-batch leaves in a stage from its forward to its backward pass."""
    element = PRECISION_BYTES[precision]
    elements, more_bytes = graph.amounts("kept", shape), graph.amounts("kept_bytes", shape)
    freed, freed_bytes = graph.amounts("freed", shape), graph.amounts("freed_bytes", shape)
    kept = sum(
        element * (elements[index] - freed[index]) + more_bytes[index] - freed_bytes[index]
        for index in layers
    )
    return round(kept + element * sum(context_kept(graph.layers[index], shape) for index in layers))


def context_kept(layer: Layer, shape: Shape) -> float:
    """Return elements that a layer keeps because context ranks divide the tokens: mainly keys and values."""
    if not shape.divides_tokens:
        return 0.0
    return shape.all_parts(layer.gathered(shape)) + layer.context_kept(shape)


def stage_input_bytes(graph: LayerGraph, layers: Sequence[int], shape: Shape, precision: str) -> int:
    """Return the bytes of all layer inputs of a stage, which one micro-batch leaves for recomputation.

    The layers before a layer send its input. A layer with none before it keeps the samples that it reads.
    """
    element, amounts = PRECISION_BYTES[precision], graph.amounts("sent", shape)
    # An input of several layers is kept once.
    sent = [amounts[one] for one in sorted({one for layer in layers for one in graph.feeders[layer]})]
    first = [layer for layer in layers if not graph.feeders[layer]]
    read, read_bytes = graph.amounts("read", shape), graph.amounts("read_bytes", shape)
    samples = (
        round(element * read[layer] + read_bytes[layer]) or stage_kept_bytes(graph, [layer], shape, precision)
        for layer in first
    )
    return round(sum(sent) * element) + sum(samples)


def stage_product_bytes(graph: LayerGraph, layers: Sequence[int], shape: Shape, precision: str) -> int:
    """Return the bytes of one micro-batch's kept products in a stage, without its layers' inputs.

    With them, a selective recomputation does not repeat the products.

    Raises:
        InputError: when a layer does not define the bytes of its products.
    """
    total = 0.0
    for layer in (graph.layers[index] for index in layers):
        if layer.products is None:
            problem = "cannot be recomputed selectively: it does not say what its products leave"
            raise InputError(Violation(f"{graph.name}: {layer.name}", problem, "full"))
        total += layer.products(shape) * PRECISION_BYTES[precision] + layer.product_bytes(shape)
    return round(total)
