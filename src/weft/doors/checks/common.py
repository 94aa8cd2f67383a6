"""Rules for every stack: arithmetic of devices and batches, and of the model's sizes where they are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.units import counted
from weft.doors.checks.base import Finding, Rule, nearest_divisor, nearest_multiple, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.keys import READ_KEYS


def devices_hold_replicas(configuration: Configuration) -> Iterator[Finding]:
    """Check that the devices form whole replicas."""
    devices, each = configuration.devices, configuration.layout.replica_ranks
    if devices is not None and devices % each:
        problem = f"{devices} is no multiple of the {each} devices that pp x tp x cp take"
        yield wrong(configuration.key("devices"), problem, str(nearest_multiple(devices, each)))


def batch_is_product(configuration: Configuration) -> Iterator[Finding]:
    """Check that the global batch is replicas x samples of a micro-batch x micro-batches."""
    batch, size = configuration.global_batch, configuration.layout.micro_batch_size
    replicas, count = configuration.replicas, configuration.micro_batches
    if batch is None:
        return
    key = configuration.key("global_batch")
    if size is None:
        unit = (replicas or 1) * (count or 1)
        if batch % unit:
            factors = f"{counted(replicas or 1, 'replica')} x {counted(count or 1, 'micro-batch')}"
            problem = f"{batch} is no multiple of {factors} = {unit}"
            yield wrong(key, problem, str(nearest_multiple(batch, unit)))
    elif replicas is not None and count is not None and batch != replicas * size * count:
        product = replicas * size * count
        terms = (
            f"{configuration.key('micro_batch_size')} {size} x {configuration.key('micro_batches')} {count}"
        )
        yield wrong(key, f"{batch}; {terms} x {counted(replicas, 'replica')} make {product}", str(product))
    elif count is None and replicas is not None and batch % (size * replicas):
        unit = size * replicas
        problem = (
            f"{batch} is no multiple of {counted(size, 'sample')} x {counted(replicas, 'replica')} = {unit}"
        )
        yield wrong(key, problem, str(nearest_multiple(batch, unit)))
    elif replicas is None and count is not None and batch % (size * count):
        unit = size * count
        problem = (
            f"{batch} is no multiple of {counted(size, 'sample')} x {counted(count, 'micro-batch')} = {unit}"
        )
        yield wrong(key, problem, str(nearest_multiple(batch, unit)))


def keys_are_spelt(configuration: Configuration) -> Iterator[Finding]:
    """Find keys that are those that weft reads but for a few letters; weft reads nothing of them."""
    given, read = configuration.given, READ_KEYS[configuration.stack]
    for key in given:
        near = [one for one in read if one not in given and _are_alike(key, one)]
        if near and key not in read:
            yield wrong(key, f"no key of {configuration.stack}", min(near))


def _are_alike(key: str, other: str) -> bool:
    """Return True if all words of two keys, or their letters without signs, are nearly the same."""
    words, others = (re.split(r"[\W_]+", one.lower()) for one in (key, other))
    alike = (SequenceMatcher(None, *pair).ratio() > 0.8 for pair in zip(words, others, strict=False))
    return "".join(words) == "".join(others) or (len(words) == len(others) and all(alike))


def pipeline_is_filled(configuration: Configuration) -> Iterator[Finding]:
    """Find pipelines with fewer micro-batches than devices: some devices idle most of a step."""
    devices, count = configuration.layout.pp or 1, configuration.micro_batches
    batch, unit = configuration.global_batch, configuration.samples_per_round
    if count is None and batch is not None and unit is not None:
        count = batch // unit or None
    if devices > 1 and count is not None and count < devices:
        problem = f"{counted(count, 'micro-batch')} cannot fill a pipeline of {devices} devices"
        yield slow(configuration.key("micro_batches"), problem, str(devices))


def axes_divide_the_model(configuration: Configuration) -> Iterator[Finding]:
    """Check that tensor ranks divide heads and columns, context ranks tokens, and stages have layers."""
    model = configuration.model
    if not isinstance(model, ModelConfig):
        return
    if model.hidden % model.heads:
        near = str(nearest_multiple(model.hidden, model.heads))
        yield wrong("hidden size", f"{model.hidden} is no multiple of {model.heads} heads", near)
        return
    graph = layer_graph(model)
    tensor, context = configuration.layout.tp or 1, configuration.layout.cp or 1
    if (reason := graph.refuse_tensor(tensor)) is not None:
        problem, _, near = reason.partition("; nearest tp: ")
        yield wrong(configuration.key("tp"), problem, near)
    chunks = 2 * context
    if context > 1 and model.sequence % chunks:
        problem = f"{model.sequence} tokens are no multiple of 2 x cp = {chunks}"
        near = str(nearest_divisor(context, max(1, model.sequence // 2)))
        yield wrong(configuration.key("cp"), problem, near)
    stages = (configuration.layout.pp or 1) * (configuration.layout.loops or 1)
    if stages > model.layers:
        problem = f"{counted(stages, 'stage')}, the model has {counted(model.layers, 'block')}"
        yield wrong(configuration.key("pp"), problem, str(model.layers))


RULES: tuple[Rule, ...] = (
    keys_are_spelt,
    devices_hold_replicas,
    batch_is_product,
    pipeline_is_filled,
    axes_divide_the_model,
)
