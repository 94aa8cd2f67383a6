"""Times of a model's layers on this machine, taken the way the executor runs them.

Forward passes of a few micro-batches, then their backward passes in the same order, as in a pipeline; every
local rank does the same at the same time. Layers of one kind are measured together and share the time, so
that caches hold what they hold in a real stage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

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
# Machines have moods of some seconds: every subject is looked at so often, those of its kind in between.
LOOKS, ROUNDS_PER_LOOK = 3, 4
LEAST_THROTTLED_ROUNDS, THROTTLED_S = 2, 0.4


@dataclass(frozen=True, slots=True)
class _Subject:
    """Equal layers and their micro-batch. `classes` is the vocabulary where they end in the head, else 0."""

    kind: str
    layers: int
    micro_batch_size: int
    stage: torch.nn.Module
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    classes: int
    saved_bytes: int

    def round(self) -> tuple[float, float, float]:
        return one_round(self.stage, self.optimizer, self.inputs, self.classes)


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
    measured = _throttled if throttled else _together
    timings: list[LayerTiming] = []
    spreads: list[float] = []
    for layers in _one_of_each_kind(graph):
        subjects = _subjects(config, graph, layers, device, precision, micro_batch_sizes)
        for subject, passes in zip(subjects, measured(subjects), strict=True):
            timings.append(_layer_timing(device_name, subject, passes))
            spreads.append(passes.backward.spread)
    return LayerProfile(
        model_fingerprint=graph.fingerprint,
        sequence=config.sequence,
        precision=precision,
        timings=tuple(timings),
        spread=median(spreads),
    )


def _layer_timing(device_name: str, subject: _Subject, passes: _Passes) -> LayerTiming:
    return LayerTiming(
        device=device_name,
        layer=subject.kind,
        tp=1,
        micro_batch_size=subject.micro_batch_size,
        forward_s=passes.forward.seconds / subject.layers,
        backward_s=passes.backward.seconds / subject.layers,
        update_s=passes.update.seconds / subject.layers,
        activation_bytes=subject.saved_bytes // subject.layers,
    )


def _subjects(
    config: ModelConfig,
    graph: LayerGraph,
    layers: tuple[int, ...],
    device: torch.device,
    precision: str,
    micro_batch_sizes: Sequence[int],
) -> list[_Subject]:
    """Layers of one kind with every micro-batch size, which share them."""
    kind = graph.layers[layers[0]].kind
    stage = build_stage(config, layers, seed=0, dtype=STEPPED[precision]).to(device)
    optimizer = _optimizer(stage, precision)
    every_input = [
        stage_inputs(stage, config, layers[0], size, PRECISIONS[precision], device)
        for size in micro_batch_sizes
    ]
    return [
        _Subject(
            kind=kind,
            layers=len(layers),
            micro_batch_size=size,
            stage=stage,
            optimizer=optimizer,
            inputs=inputs,
            classes=config.vocabulary if kind == "head" else 0,
            saved_bytes=_saved_bytes(stage, inputs),
        )
        for size, inputs in zip(micro_batch_sizes, every_input, strict=True)
    ]


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


def _together(subjects: Sequence[_Subject]) -> list[_Passes]:
    """All ranks begin every round at the same time; the first one of each look warms up."""
    rounds: list[list[tuple[float, float, float]]] = [[] for _ in subjects]
    for _ in range(LOOKS):
        for subject, seconds in zip(subjects, rounds, strict=True):
            for number in range(ROUNDS_PER_LOOK + 1):
                if dist.is_initialized():
                    dist.barrier()
                taken = subject.round()
                if number:
                    seconds.append(taken)
    return [
        _Passes(*(slowest(summarise(list(values))) for values in zip(*seconds, strict=True)))
        for seconds in rounds
    ]


def _throttled(subjects: Sequence[_Subject]) -> list[_Passes]:
    """Rounds without a pause, in which a quota would recover, and many: most short passes meet no throttling
    and some a long one, so that nothing but the plain mean says what they take."""
    rounds: list[list[tuple[float, float, float]]] = [[] for _ in subjects]
    for _ in range(LOOKS):
        for subject, seconds in zip(subjects, rounds, strict=True):
            subject.round()
            begin, number = time.perf_counter(), 0
            while number < LEAST_THROTTLED_ROUNDS or time.perf_counter() - begin < THROTTLED_S:
                seconds.append(subject.round())
                number += 1
    return [
        _Passes(*(Timing(fmean(values), 0.0) for values in zip(*seconds, strict=True))) for seconds in rounds
    ]


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
