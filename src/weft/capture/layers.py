"""Times of a model's layers on this machine, taken the way the executor runs them.

Forward passes of a few micro-batches, then their backward passes in the same order, as in a pipeline; every
local rank does the same at the same time. Layers of one kind are measured together and share the time, so
that caches hold what they hold in a real stage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.distributed as dist

from weft.capture.rounds import one_round, stage_inputs
from weft.capture.timing import Timing, slowest, summarise
from weft.describe.families.own import FAMILY
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation
from weft.predict.profile import LayerProfile, LayerTiming
from weft.run.bucket import FlatLayout
from weft.run.precision import PRECISIONS, STEPPED
from weft.run.stages import build_stage
from weft.run.states import make_states

LAYERS_PER_KIND = 4
ROUNDS = 10
LEAST_THROTTLED_ROUNDS, THROTTLED_S = 5, 1.0


@dataclass(frozen=True, slots=True)
class _Passes:
    forward: Timing
    backward: Timing
    update: Timing


def profile_layers(
    config: ModelConfig,
    graph: LayerGraph,
    device_name: str,
    device: torch.device,
    *,
    precision: str,
    micro_batch_sizes: Sequence[int],
    throttled: bool = False,
) -> LayerProfile:
    """Measure every kind of layer at every micro-batch size; call it on all local ranks at once.

    The times are those of the slowest rank; of `throttled` ranks, which have quotas of processor time, each
    returns its own. A layer's `activation_bytes` is what autograd saves for its backward pass, without
    parameters.

    Raises:
        InputError: when the model cannot be built, or is one's own.
    """
    if config.family == FAMILY:
        problem = f"{config.name!r}: layers of one's own are not measured; they are planned by their sizes"
        raise InputError(Violation("model", problem))
    # A layer alone cannot share its table with another one, and costs the same without sharing.
    config = replace(config, tied_embeddings=False)
    timings = []
    spreads = []
    for layers in _one_of_each_kind(graph):
        kind = graph.layers[layers[0]].kind
        stage = build_stage(config, layers, seed=0, dtype=STEPPED[precision]).to(device)
        optimizer = _optimizer(stage, precision)
        for size in micro_batch_sizes:
            inputs = stage_inputs(stage, config, layers[0], size, PRECISIONS[precision], device)
            saved = _saved_bytes(stage, inputs)
            measured = _throttled if throttled else _together
            passes = measured(stage, optimizer, inputs, config.vocabulary if kind == "head" else 0)
            spreads.append(passes.backward.spread)
            timings.append(
                LayerTiming(
                    device=device_name,
                    layer=kind,
                    tp=1,
                    micro_batch_size=size,
                    forward_s=passes.forward.seconds / len(layers),
                    backward_s=passes.backward.seconds / len(layers),
                    update_s=passes.update.seconds / len(layers),
                    activation_bytes=saved // len(layers),
                )
            )
    return LayerProfile(
        model_fingerprint=graph.fingerprint,
        sequence=config.sequence,
        precision=precision,
        timings=tuple(timings),
        spread=sorted(spreads)[len(spreads) // 2],
    )


def _one_of_each_kind(graph: LayerGraph) -> list[tuple[int, ...]]:
    """Up to `LAYERS_PER_KIND` consecutive equal layers of each kind."""
    groups: list[list[int]] = []
    seen: dict[object, int] = {}
    for index, layer in enumerate(graph.layers):
        key = replace(layer, name="")
        if key not in seen:
            seen[key] = len(groups)
            groups.append([])
        group = groups[seen[key]]
        if len(group) < LAYERS_PER_KIND and (not group or group[-1] == index - 1):
            group.append(index)
    return [tuple(group) for group in groups]


def _optimizer(stage: torch.nn.Module, precision: str) -> torch.optim.Optimizer:
    """Steps the stage, which gets that precision, as the runtime would."""
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6)
    dtypes = {"dtype": PRECISIONS[precision], "stepped_dtype": STEPPED[precision]}
    make_states({0: FlatLayout.of(stage)}, {0: optimizer}, {}, "zero-0", **dtypes)
    return optimizer


def _together(
    stage: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, classes: int
) -> _Passes:
    """All ranks begin every round at the same time."""
    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS + 1):
        if dist.is_initialized():
            dist.barrier()
        rounds.append(one_round(stage, optimizer, inputs, classes))
    forward, backward, update = zip(*rounds[1:], strict=True)
    return _Passes(*(slowest(summarise(list(values))) for values in (forward, backward, update)))


def _throttled(
    stage: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, classes: int
) -> _Passes:
    """Rounds without a pause, in which a quota would recover, and many: most short passes meet no throttling
    and some a long one, so that nothing but the plain mean says what they take."""
    rounds: list[tuple[float, float, float]] = []
    begin = time.perf_counter()
    while len(rounds) < LEAST_THROTTLED_ROUNDS or time.perf_counter() - begin < THROTTLED_S:
        rounds.append(one_round(stage, optimizer, inputs, classes))
    return _Passes(*(Timing(fmean(values), 0.0) for values in zip(*rounds[1:], strict=True)))


def _saved_bytes(stage: torch.nn.Module, inputs: torch.Tensor) -> int:
    """Bytes of the distinct storages autograd keeps for the backward pass, parameters excluded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaf = inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(leaf)
    del output
    return sum(storages.values())
