"""`Throughput`: what a step of a plan does in a second, as users compare it with other programs."""

from __future__ import annotations

from dataclasses import dataclass

from weft.describe.amount import Shape
from weft.describe.catalogue import Reached, canonical_name, catalogue
from weft.describe.cluster import Cluster
from weft.describe.job import Job


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The samples, tokens and operations of a second, on the devices that a plan uses.

    Attributes:
        tokens_per_s: None for models of images.
        flops_per_s: floating-point operations of the model. No layer counts twice that is recomputed, and
            causal attention counts in full (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).
        utilisation: `flops_per_s` over the peak of the devices: model flops utilisation, MFU.
    """

    devices: int
    samples_per_s: float
    tokens_per_s: float | None
    flops_per_s: float
    utilisation: float


def throughput(job: Job, devices: int, step_s: float, *, reads_tokens: bool) -> Throughput:
    """Return the throughput of a step on the first so many devices of the job's cluster."""
    samples_per_s = job.global_batch / step_s
    return Throughput(
        devices=devices,
        samples_per_s=samples_per_s,
        tokens_per_s=job.sequence * samples_per_s if reads_tokens else None,
        flops_per_s=model_flops(job) / step_s,
        utilisation=model_flops_utilisation(job, devices, step_s),
    )


def doubt(cluster: Cluster, precision: str, found: Throughput) -> str | None:
    """Return a doubt about a predicted utilisation that no published training has reached, or None.

    It judges accelerators in half precision. A device without a figure of its own is held against the
    highest figure of all.
    """
    if precision not in ("bf16", "fp16") or any(group.device.synchronous for group in cluster.groups):
        return None
    known = {name: entry.reached for name, entry in catalogue().items() if entry.reached is not None}
    highest = max(known.values(), key=lambda one: one.utilisation)
    names = {canonical_name(group.device.name) for group in cluster.groups}
    reached: Reached = max((known.get(name, highest) for name in names), key=lambda one: one.utilisation)
    if found.utilisation <= reached.utilisation:
        return None
    most = f"{reached.utilisation:.0%}, the highest published utilisation ({reached.source})"
    return f"above {most}: measure before you rely on it"


def model_flops_utilisation(job: Job, devices: int, step_s: float) -> float:
    """Return the model's operations of a second over the peak of the first so many devices, in [0, 1]."""
    return model_flops(job) / (step_s * peak_flops_per_s(job.cluster, devices, job.precision))


def model_flops(job: Job) -> float:
    """Return the floating-point operations of the model in a step, without recomputation."""
    shape = Shape(job.global_batch, job.sequence)
    return sum(layer.flops(shape) for layer in job.graph.layers)


def peak_flops_per_s(cluster: Cluster, devices: int, precision: str) -> float:
    """Return the peak of the first so many devices together."""
    peak, left = 0.0, devices
    for group in cluster.groups:
        own = min(left, group.count * group.devices)
        # Servers may not have the precision.
        peak += own * group.device.flops_per_s[precision] if own else 0.0
        left -= own
    return peak
