"""The best configuration of each method over the batch per GPU, predicted.

Lamy-Poirier (arXiv 2211.05953): GPTs of 52 and 6.6 billion parameters on 64 V100 of 32 GB in 8 nodes on
InfiniBand. Breadth-first, depth-first, 1F1B, GPipe and no pipeline, each with the layout that is fastest of
those that fit into memory; depth-first and 1F1B also as they were shipped when they were measured. Once every
layer is recomputed, as in the paper, and once the planner decides.

    python examples/breadth-first/methods.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from claims import say

from weft.cli.curve import utilisation_table
from weft.cli.output import console
from weft.cli.shown import with_ranks
from weft.describe.layout import PartialLayout
from weft.describe.plan import Sharding
from weft.describe.units import format_bytes, format_seconds
from weft.planning.curve import (
    BREADTH_FIRST,
    METHODS,
    RIVALS,
    Curve,
    CurvePoint,
    Method,
    MethodPlanner,
    curve,
    job_of,
    point_of,
)
from weft.planning.planners import Candidate, Verdict
from weft.planning.problem import Problem, problem_of
from weft.web.charts.curve import share_text

MODELS = ("gpt-52b", "gpt-6.6b")
CLUSTER = "64xv100-32gb"
PAPER_GAINS = {"gpt-52b": "up to 43 % (workshop version: 53 %)", "gpt-6.6b": "tens of percent"}
SMALL = 2
# Eight replicas of 8 pipeline devices with 8 tensor ranks each, so that there are states to share out.
REPLICATED = 512
# More finalists than any space has layouts: all that may fit are simulated.
_ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The lead of breadth-first over a rival as shipped, as fractions of throughput.

    Attributes:
        rival: the method in comparison.
        samples_per_device: beta.
        schedule: the lead over the rival with communication overlapped and states sharded as far as it helps.
        implementation: the lead of that improved rival over the rival as shipped.
    """

    rival: Method
    samples_per_device: float
    schedule: float
    implementation: float

    @property
    def total(self) -> float:
        """The lead over the rival as shipped."""
        return (1.0 + self.schedule) * (1.0 + self.implementation) - 1.0


def gains(answer: Curve) -> tuple[Gain, ...]:
    """Return the gains of breadth-first over each rival where all three fit; needs all `METHODS`."""
    found: list[Gain] = []
    for rival, shipped in RIVALS.items():
        ours, overlapped, blocking = (
            answer.utilisation(method.name) for method in (BREADTH_FIRST, rival, shipped)
        )
        found.extend(
            Gain(
                rival=rival,
                samples_per_device=share,
                schedule=ours[share] / overlapped[share] - 1.0,
                implementation=overlapped[share] / blocking[share] - 1.0,
            )
            for share in answer.samples_per_device
            if share in ours and share in overlapped and share in blocking
        )
    return tuple(found)


def least_memory(problem: Problem, method: Method, samples_per_device: float) -> CurvePoint:
    """Return the fitting layout of a method with the lowest peak.

    It uses micro-batches of one sample and full recomputation, unless pinned otherwise. With replicas it
    shards states as far as the method or a pin allows. The lowest peak must be there.
    """
    pins = problem.pins.replaced(
        micro_batch_size=problem.pins.micro_batch_size or 1,
        recompute=problem.pins.recompute or "full",
    )
    job = job_of(problem, samples_per_device)
    planner = MethodPlanner(finalists=_ALL, method=replace(method, sharding=None))
    found: list[Candidate] = []
    for sharding in _least_states(method, pins):
        pinned = pins.replaced(sharding=sharding)
        found.extend(planner.search(replace(problem, job=job, pins=pinned, minimise="memory")).candidates[:1])
    found.sort(key=lambda candidate: (candidate.verdict is not Verdict.FITS, candidate.peak_bytes))
    return point_of(job, method, samples_per_device, found)


def _least_states(method: Method, pins: PartialLayout) -> tuple[Sharding, ...]:
    """Return the furthest allowed sharding, and no sharding for layouts without replicas."""
    pinned = method.sharding or pins.sharding
    return ("zero-3", "zero-0") if pinned is None else (pinned,)


def say_gains(answer: Curve, paper: str) -> None:
    small = answer.samples_per_device[:SMALL]
    for share in small:
        ours = answer.point(BREADTH_FIRST.name, share).utilisation
        others = {
            method.name: answer.point(method.name, share).utilisation
            for method in answer.methods
            if method != BREADTH_FIRST
        }
        best = max(others, key=lambda name: others[name])
        say(
            f"breadth-first is best at {share_text(share)} samples per GPU",
            paper="it is",
            predicted=f"{ours:.1%}; next {best} with {others[best]:.1%}, {ours / others[best] - 1:+.1%}",
            holds=ours >= others[best],
        )
    for gain in gains(answer):
        if gain.samples_per_device in small:
            share = share_text(gain.samples_per_device)
            say(
                f"gain over {gain.rival.name} as shipped at {share} is at least 10 %",
                paper=paper,
                predicted=f"{gain.total:+.1%}: schedule {gain.schedule:+.1%}, "
                f"implementation {gain.implementation:+.1%}",
                holds=gain.total >= 0.1,
                why_not="with one micro-batch per device both orders are nearly one; only overlap remains",
            )


def say_memory(problem: Problem, share: float) -> None:
    """At the paper's degrees and with replicas, because weights cannot be shared out by one."""
    pins = PartialLayout(pp=8, tp=8, recompute="full")
    posed = with_ranks(replace(problem, pins=pins), REPLICATED)
    peaks, steps = {}, {}
    for method in METHODS:
        point = least_memory(posed, method, share)
        if method.pipelined and point.candidate is not None:
            name = method.name
            peaks[name], steps[name] = point.candidate.peak_bytes, point.step_s
            print(f"  {name:<24}{format_bytes(peaks[name]):>9}, step {format_seconds(steps[name]):>7}")
            print(f"  {'':<24}{point.candidate.layout}")
    ours = peaks.pop(BREADTH_FIRST.name)
    least = min(peaks, key=lambda name: peaks[name])
    say(
        f"breadth-first with ZeRO-3 has the lowest memory of the pipelines at {share_text(share)}",
        paper="it has",
        predicted=f"{format_bytes(ours)}; least of the others {format_bytes(peaks[least])} ({least}), "
        f"{ours / peaks[least] - 1:+.1%}",
        holds=ours <= peaks[least],
        why_not=f"all micro-batches are in flight at once; the step of {least} takes "
        f"{steps[least] / steps[BREADTH_FIRST.name]:.1f} times as long, as it gathers more often",
    )


def main() -> None:
    for model in MODELS:
        for pins, words in (
            (PartialLayout(recompute="full"), "every layer recomputed"),
            (PartialLayout(), "recomputing where it helps"),
        ):
            problem = problem_of(model=model, on=CLUSTER, precision="fp16", pins=pins)
            answer = curve(problem)
            print(f"\n{model} on {CLUSTER}, fp16, {words}: utilisation by samples per GPU")
            console().print(utilisation_table(answer))
            say_gains(answer, PAPER_GAINS[model])
        for share in answer.samples_per_device[:SMALL]:
            print(
                f"\n{model} on {REPLICATED} GPUs, {share_text(share)} samples per GPU: lowest memory of each"
            )
            say_memory(problem, share)


if __name__ == "__main__":
    main()
