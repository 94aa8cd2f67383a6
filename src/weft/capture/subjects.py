"""Subjects of measurements: equal layers of a model as their own stage, or a tensor rank's share of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.capture.layer_costs import storages_saved
from weft.describe.families.multimodal import towers_of
from weft.describe.families.own import ShowsSamples
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.run.accelerator import finish
from weft.run.parallel.loss_input import DividesOutput
from weft.run.parallel.tensor_stage import SummedGradients, disconnect_stages, summed_gradients, tensor_ranks
from weft.run.stage.build import build_stage
from weft.run.stage.families.own import OwnStage, own_stage
from weft.run.stage.stage_module import StageModule
from weft.run.stage.wiring import Wired
from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import PRECISIONS, STEPPED, at_least_fp32
from weft.run.state.states import make_states
from weft.run.transport.device_group import GLOO
from weft.run.transport.host_group import HostGroup

IN_FLIGHT = 4


def stage_inputs(
    stage: torch.nn.Module,
    config: ModelConfig,
    first_layer: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    own: ShowsSamples | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the values of a micro-batch for a stage that begins at `first_layer`.

    They are token ids, pixels, features, or outputs of other layers, which alone require gradients. A user's
    `own` model has samples itself.
    """
    generator = torch.Generator().manual_seed(first_layer)

    def output(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_()

    given = None if own is None else own.samples(size)
    if isinstance(stage, Wired):
        if given is not None:
            samples = [given[number].to(device) for number in stage.inputs]
        else:
            samples = [_sample_input(config, number, size, generator).to(device) for number in stage.inputs]
        return (*samples, *(output(stage.value_shape(layer, size)) for layer in stage.takes))
    if given is not None and first_layer == 0:
        return (given[0].to(device),)
    shape = stage.input_shape(size, config.sequence)  # type: ignore[operator]
    if first_layer == 0 and config.reads_images:
        return (torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(device),)
    if first_layer == 0:
        return (torch.randint(config.vocabulary, shape, generator=generator).to(device),)
    return (output(shape),)


def _sample_input(config: ModelConfig, number: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return the input of that number of `size` samples of a model with several inputs."""
    if config.reads_images and number == 0:
        shape = (size, config.channels, config.image_size, config.image_size)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if config.towers is None:
        return torch.randint(config.vocabulary, (size, config.sequence), generator=generator)
    towers = towers_of(config)
    if towers.tokens:
        return torch.randint(towers.tokens[number], (size, config.sequence), generator=generator)
    if number < len(towers.features):
        return torch.randn((size, towers.features[number]), generator=generator)
    rows = towers.tables[number - len(towers.features)]
    return torch.randint(rows, (size, towers.looked_up), generator=generator)


def one_round(
    stage: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Sequence[torch.Tensor],
    *,
    ends: bool,
    summed: Sequence[SummedGradients] = (),
) -> tuple[float, float, float]:
    """Return the seconds of one forward, one backward and one update.

    `IN_FLIGHT` micro-batches run forward, then backward in the same order, as in a pipeline. A stage that
    `ends` in the head computes the loss. If tensor ranks divide the stage, all of them call it at once. The
    gradients they add up once a step (`summed`) count with the update.
    """

    def clock() -> float:
        finish(inputs[0].device)
        return time.perf_counter()

    contexts = []
    begin = clock()
    for _ in range(IN_FLIGHT):
        outputs = _outputs(stage, inputs)
        contexts.append((_loss(stage, outputs[0]),) if ends else outputs)
    forwarded = clock()
    for outputs in contexts:
        torch.autograd.backward(outputs, tuple(map(torch.ones_like, outputs)))
    backwarded = clock()
    for one in summed:
        one.add_up()
    if optimizer is not None:
        optimizer.step()
    stage.zero_grad(set_to_none=False)
    updated = clock()
    return (
        (forwarded - begin) / IN_FLIGHT,
        (backwarded - forwarded) / IN_FLIGHT,
        updated - backwarded,
    )


def _outputs(stage: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Run a stage on inputs that are new leaves."""
    given = stage(*(one.detach().requires_grad_(one.requires_grad) for one in inputs))
    return (given,) if isinstance(given, torch.Tensor) else given


def _loss(stage: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the stage's logits, or of its share of them."""
    targets = torch.zeros(output.shape[:-1], dtype=torch.long, device=output.device)
    share = stage.divided(output) if isinstance(stage, DividesOutput) else None
    if share is not None:
        return share.cross_entropy(targets)
    return torch.nn.functional.cross_entropy(at_least_fp32(output).flatten(0, -2), targets.flatten())


LAYERS_PER_KIND = 4


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """This process among tensor ranks: its rank, their number, and their group if there are several."""

    place: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class CaptureSubject:
    """Equal layers and their micro-batch; `ends` is True if they end in the head."""

    kind: str
    layers: int
    micro_batch_size: int
    stage: StageModule | OwnStage
    optimizer: torch.optim.Optimizer | None
    summed: tuple[SummedGradients, ...]
    inputs: tuple[torch.Tensor, ...]
    ends: bool
    saved_bytes: int

    def round(self) -> tuple[float, float, float]:
        """Return the seconds of `one_round`: a forward, a backward and an update."""
        return one_round(self.stage, self.optimizer, self.inputs, ends=self.ends, summed=self.summed)


@contextmanager
def tensor_place(tensor_parallel: int) -> Iterator[TensorPlace]:
    """Yield this process's place among neighbouring tensor ranks, as in a plan; all ranks call it at once.

    `tensor_parallel` divides the number of ranks.
    """
    if tensor_parallel == 1:
        yield TensorPlace()
        return
    ranks = range(dist.get_world_size())
    # Every rank makes all groups, in the same order: torch requires it.
    groups = [
        dist.new_group(list(ranks[first : first + tensor_parallel]), backend=GLOO)
        for first in ranks[::tensor_parallel]
    ]
    number, place = divmod(dist.get_rank(), tensor_parallel)
    try:
        yield TensorPlace(place, tensor_parallel, groups[number])
    finally:
        dist.destroy_process_group(groups[number])


@contextmanager
def subjects_of(
    config: ModelConfig,
    graph: LayerGraph,
    layers: tuple[int, ...],
    device: torch.device,
    precision: str,
    micro_batch_sizes: Sequence[int],
    tensor: TensorPlace,
    own: ShowsSamples | None = None,
) -> Iterator[list[CaptureSubject]]:
    """Yield one subject per micro-batch size; all share the same layers of one kind.

    `own` is the built model if it is a user's own. It is built once, for all kinds.
    """
    kind = graph.layers[layers[0]].kind
    share = (tensor.place, tensor.size)
    if own is None:
        stage = build_stage(config, layers, seed=0, dtype=STEPPED[precision], tensor_share=share).to(device)
    else:
        stage = own_stage(own, layers, 0, STEPPED[precision]).to(device)
    if tensor.group is not None:
        tensor_ranks(stage).connect(HostGroup(tensor.group))
    optimizer, summed = _trained(stage, precision)
    every_input = [
        stage_inputs(stage, config, layers[0], size, PRECISIONS[precision], device, own)
        for size in micro_batch_sizes
    ]
    try:
        yield [
            CaptureSubject(
                kind=kind,
                layers=len(layers),
                micro_batch_size=size,
                stage=stage,
                optimizer=optimizer,
                summed=summed,
                inputs=inputs,
                ends=layers[-1] == len(graph.layers) - 1,
                saved_bytes=_saved_bytes(stage, inputs),
            )
            for size, inputs in zip(micro_batch_sizes, every_input, strict=True)
        ]
    finally:
        disconnect_stages({0: stage})


def one_of_each_kind(graph: LayerGraph) -> list[tuple[int, ...]]:
    """Return up to `LAYERS_PER_KIND` consecutive equal layers of each kind."""
    groups: dict[int, list[int]] = {}
    for index, alike in enumerate(graph.alike):
        group = groups.setdefault(alike, [])
        if len(group) < LAYERS_PER_KIND and (not group or group[-1] == index - 1):
            group.append(index)
    return [tuple(group) for group in groups.values()]


def _trained(
    stage: torch.nn.Module, precision: str
) -> tuple[torch.optim.Optimizer | None, tuple[SummedGradients, ...]]:
    """Set the stage's precision; return its optimizer and its tensor ranks' summed gradients, as in a run.

    Without parameters, there is no optimizer.
    """
    if not any(True for _ in stage.parameters()):
        return None, ()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6, fused=True)
    layouts, dtype, stepped = {0: FlatLayout.of(stage)}, PRECISIONS[precision], STEPPED[precision]
    states = make_states(layouts, {0: optimizer}, {}, "zero-0", dtype=dtype, stepped_dtype=stepped)
    return optimizer, summed_gradients({0: stage}, layouts, {0: states.buckets[0].flat})[0]


def _saved_bytes(stage: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    with storages_saved(stage.parameters()) as kept:
        outputs = _outputs(stage, inputs)
    del outputs
    return sum(one.nbytes for one in kept.values())
