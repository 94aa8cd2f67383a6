"""The published model of a pipeline with second-order work in its bubbles (PipeFisher, arXiv 2211.14133).

All stages are alike; messages take no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from weft.errors import InputError, Violation


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Times of one stage.

    Attributes:
        forward_s, backward_s, curvature_s: of one micro-batch.
        inversion_s: of all factors of the stage.
        precondition_s: of all gradients of the stage, once in every step.
    """

    forward_s: float
    backward_s: float
    curvature_s: float
    inversion_s: float
    precondition_s: float

    def recomputed(self) -> StageSeconds:
        """Return the times of a stage that runs each forward pass again before its backward pass."""
        return replace(self, backward_s=self.backward_s + self.forward_s)


def critical_passes(schedule: str, stages: int, micro_batches: int) -> tuple[float, float]:
    """Return the forward and the backward passes of a step that come one after the other.

    Those of chimera with more micro-batches than stages are the published ones. Its order takes longer.

    Args:
        schedule: gpipe, 1f1b or chimera.
        stages: as many as devices.
        micro_batches: of a step, in both directions of chimera together.

    Raises:
        InputError: for another schedule, or counts that chimera does not run.
    """
    if schedule in ("gpipe", "1f1b"):
        return micro_batches + stages - 1, micro_batches + stages - 1
    if schedule != "chimera":
        raise InputError(Violation("schedule", f"{schedule!r} has no model", "gpipe"))
    if stages % 2 or micro_batches % stages:
        problem = (
            f"chimera has even stages and a multiple of them as micro-batches, not {stages}, {micro_batches}"
        )
        raise InputError(Violation("schedule", problem))
    if micro_batches == stages:
        return stages, 2 * stages - 2
    return micro_batches + stages / 2 - 1, micro_batches + stages / 2 - 1


@dataclass(frozen=True, kw_only=True)
class ModelledStep:
    """A step of a pipeline, without and with second-order work.

    Attributes:
        schedule, stages, micro_batches: as of `critical_passes`.
        times: of one stage.
    """

    schedule: str
    stages: int
    micro_batches: int
    times: StageSeconds

    @property
    def pipeline_s(self) -> float:
        """Seconds of the passes of a step."""
        forwards, backwards = critical_passes(self.schedule, self.stages, self.micro_batches)
        return forwards * self.times.forward_s + backwards * self.times.backward_s

    @property
    def busy_s(self) -> float:
        """Seconds that a device computes passes."""
        return self.micro_batches * (self.times.forward_s + self.times.backward_s)

    @property
    def bubble_s(self) -> float:
        """Seconds that a device is idle."""
        return self.pipeline_s - self.busy_s

    @property
    def work_s(self) -> float:
        """Seconds of curvature and inversions of a window."""
        return self.times.inversion_s + self.micro_batches * self.times.curvature_s

    @property
    def refresh_ratio(self) -> float:
        """Work over idle time."""
        return self.work_s / self.bubble_s if self.bubble_s > 0 else inf

    @property
    def least_steps(self) -> float:
        """The fewest steps whose bubbles hold the work; infinity without bubbles."""
        return inf if self.refresh_ratio == inf else max(1, ceil(self.refresh_ratio))

    @property
    def utilisation(self) -> float:
        """The busy share of a step without work in its bubbles."""
        return self.busy_s / self.pipeline_s

    def filled_utilisation(self, steps: int) -> float:
        """Return the busy share of a window of so many steps that holds the work."""
        return self.utilisation + self.work_s / (steps * self.pipeline_s)

    @property
    def filled_step_s(self) -> float:
        """Seconds of a step with the work in bubbles."""
        return self.pipeline_s + self.times.precondition_s

    def serial_step_s(self, interval: int = 1) -> float:
        """Return the mean seconds of a step with the work at the end of every `interval`-th one."""
        return self.filled_step_s + self.work_s / interval


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Memory of one stage.

    Attributes:
        activations, output_gradients: that one micro-batch saves.
        peak_gradients: of a backward pass in progress.
        factors: all factors of the stage; their inverses take as much.
        parameters: of the stage; their gradients take as much.
    """

    activations: int
    output_gradients: int
    peak_gradients: int
    factors: int
    parameters: int

    def of_device(self, micro_batches: int, *, recomputed: bool = False, stages: int = 1) -> int:
        """Return the published peak of a device.

        Args:
            micro_batches: whose activations and output gradients are there at once.
            recomputed: whether only one micro-batch has its activations.
            stages: 2 for chimera, whose devices hold the parameters of two stages.
        """
        return (
            self.activations * (1 if recomputed else micro_batches)
            + self.peak_gradients
            + self.output_gradients * micro_batches
            + 2 * self.factors
            + 2 * self.parameters * stages
        )
