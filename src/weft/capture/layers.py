"""Times of a model's layers on this machine, measured as the executor runs them.

A few micro-batches run forward, then backward in the same order, as in a pipeline. Every local rank does the
same at the same time. Layers of one kind are measured together and share the time. So caches hold the same
data as in a real stage. If tensor ranks divide the layers, the times include the exchange between them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
import torch.distributed as dist

from weft.capture.subjects import CaptureSubject, TensorPlace, one_of_each_kind, subjects_of, tensor_place
from weft.capture.timing import Timing, slowest, summarise
from weft.describe.families.own import FAMILY, ShowsSamples, own_model
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation
from weft.predict.profile import LayerProfile, LayerTiming
from weft.progress import CountedWork, ProgressReport, unwatched

# The speed of a machine changes within seconds: subjects of one kind are measured in turn, in several looks.
LOOKS, ROUNDS_PER_LOOK = 3, 4
LEAST_THROTTLED_ROUNDS, THROTTLED_S = 2, 0.4


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
    tensor_degrees: Sequence[int] = (1,),
    throttled: bool = False,
    report: ProgressReport = unwatched,
) -> LayerProfile:
    """Measure every kind of layer at every tensor degree and micro-batch size.

    All local ranks call it at once and return the times of the slowest rank. Ranks with quotas of processor
    time (`throttled`) return their own times. A layer's `activation_bytes` are the bytes that autograd saves
    for its backward pass on one rank, without parameters. With a degree of 2 or more all ranks are tensor
    ranks, each with its neighbours.

    Raises:
        InputError: when the model cannot be built or divided, is a file of layers, or has no samples.
    """
    own = _own(config)
    # A single layer cannot share its table with another layer, and costs the same without sharing.
    config = replace(config, tied_embeddings=False)
    timings: list[LayerTiming] = []
    spreads: list[float] = []
    kinds = one_of_each_kind(graph)
    looks = LOOKS * len(tensor_degrees) * len(kinds) * len(micro_batch_sizes)
    counted = CountedWork(report, f"layers of {config.name}", looks, "parts")
    for degree in tensor_degrees:
        with tensor_place(degree) as tensor:
            for layers in kinds:
                with subjects_of(
                    config, graph, layers, device, precision, micro_batch_sizes, tensor, own
                ) as subjects:
                    measured = (
                        _throttled(subjects, tensor, counted) if throttled else _together(subjects, counted)
                    )
                    for subject, passes in zip(subjects, measured, strict=True):
                        timings.append(_layer_timing(device_name, degree, subject, passes))
                        spreads.append(passes.backward.spread)
    return LayerProfile(
        model_fingerprint=graph.fingerprint,
        sequence=config.sequence,
        precision=precision,
        timings=tuple(timings),
        spread=median(spreads),
    )


def _own(config: ModelConfig) -> ShowsSamples | None:
    """Return a user's own model; None for one of weft's families."""
    if config.family != FAMILY:
        return None
    own = own_model(config.name)
    if not isinstance(own, ShowsSamples):
        problem = f"{config.name!r} has no samples to measure layers with (`samples(count)`)"
        raise InputError(Violation("model", problem, "a weft.BlockModel"))
    return own


def _layer_timing(device_name: str, degree: int, subject: CaptureSubject, passes: _Passes) -> LayerTiming:
    return LayerTiming(
        device=device_name,
        layer=subject.kind,
        tp=degree,
        micro_batch_size=subject.micro_batch_size,
        forward_s=passes.forward.seconds / subject.layers,
        backward_s=passes.backward.seconds / subject.layers,
        update_s=passes.update.seconds / subject.layers,
        activation_bytes=subject.saved_bytes // subject.layers,
    )


def _together(subjects: Sequence[CaptureSubject], counted: CountedWork) -> list[_Passes]:
    """Time rounds that all ranks begin at the same time; the first round of each look warms up."""
    rounds: list[list[tuple[float, float, float]]] = [[] for _ in subjects]
    for _ in range(LOOKS):
        for subject, seconds in zip(subjects, rounds, strict=True):
            for number in range(ROUNDS_PER_LOOK + 1):
                if dist.is_initialized():
                    dist.barrier()
                taken = subject.round()
                if number:
                    seconds.append(taken)
            counted.finish()
    return [
        _Passes(*(slowest(summarise(list(values))) for values in zip(*seconds, strict=True)))
        for seconds in rounds
    ]


def _throttled(
    subjects: Sequence[CaptureSubject], tensor: TensorPlace, counted: CountedWork
) -> list[_Passes]:
    """Time many rounds without pauses, in which a quota would recover.

    Most short passes meet no throttling and some meet a long one: only the plain mean gives their time.
    """
    rounds: list[list[tuple[float, float, float]]] = [[] for _ in subjects]
    for _ in range(LOOKS):
        for subject, seconds in zip(subjects, rounds, strict=True):
            subject.round()
            begin, number = time.perf_counter(), 0
            while _any_rank(
                number < LEAST_THROTTLED_ROUNDS or time.perf_counter() - begin < THROTTLED_S, tensor
            ):
                seconds.append(subject.round())
                number += 1
            counted.finish()
    return [
        _Passes(*(Timing(fmean(values), 0.0) for values in zip(*seconds, strict=True))) for seconds in rounds
    ]


def _any_rank(wants_more: bool, tensor: TensorPlace) -> bool:
    """Return True if one of the tensor ranks wants another round, which needs all of them."""
    if tensor.group is None:
        return wants_more
    wanted = torch.tensor([int(wants_more)])
    dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=tensor.group)
    return bool(wanted.item())
