"""What the instructions of one rank work on: modules, gradients, messages, and values on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weft.program.kinds import (
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
)
from weft.program.program import Program
from weft.run.randomness import counter_seed
from weft.run.resources import Resources


class MicroBatch(NamedTuple):
    """What a global micro-batch number stands for; both on any device."""

    inputs: torch.Tensor
    targets: torch.Tensor


# A rank asks only for the micro-batches that its first or last stages need.
Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Route:
    """How values cross stage borders on one rank.

    `before`, `after`: the neighbouring stages of each stage. The sets hold the (stage, micro-batch) whose
    value crosses to another rank; every other value is handed over inside the rank.
    """

    before: Mapping[int, int]
    after: Mapping[int, int]
    activations_sent: frozenset[tuple[int, int]]
    activations_received: frozenset[tuple[int, int]]
    gradients_sent: frozenset[tuple[int, int]]
    gradients_received: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, program: Program, rank: int) -> Route:
        rows = slice(int(program.rank_starts[rank]), int(program.rank_starts[rank + 1]))
        columns = program.columns

        def crossing(kind: int) -> frozenset[tuple[int, int]]:
            mine = columns.kind[rows] == kind
            pairs = zip(columns.stage[rows][mine], columns.micro_batch[rows][mine], strict=True)
            return frozenset((int(stage), int(micro_batch)) for stage, micro_batch in pairs)

        return cls(
            before={consumer: producer for producer, consumer in program.obligations.stage_edges},
            after=dict(program.obligations.stage_edges),
            activations_sent=crossing(SEND_ACTIVATION),
            activations_received=crossing(RECEIVE_ACTIVATION),
            gradients_sent=crossing(SEND_GRADIENT),
            gradients_received=crossing(RECEIVE_GRADIENT),
        )


@dataclass(kw_only=True)
class Workspace:
    """One program's values on one rank.

    Attributes:
        training: keep what backward needs.
        micro_batch_weight: one over the micro-batches of the global batch, so that the losses add up to the
            global mean.
        values: by (name, stage, micro-batch); whoever reads a value takes it away.
        last_gradients: positions of the computations that complete a stage's gradient.
        step, batch, loss: of the step under way; `loss` is this rank's share.
    """

    resources: Resources
    route: Route
    training: bool
    micro_batch_weight: float
    values: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    last_gradients: frozenset[int] = frozenset()
    step: int = 0
    batch: Batch | None = None
    loss: float = 0.0

    def micro_batch(self, number: int) -> MicroBatch:
        assert self.batch is not None, "a step begins with its batch"
        return MicroBatch(*self.batch(number))

    def arrived(self, name: str, stage: int, micro_batch: int) -> torch.Tensor:
        """Take a value, waiting for it when it comes from another rank."""
        value = self.values.pop((name, stage, micro_batch))
        return value.wait().to(self.resources.device) if not isinstance(value, torch.Tensor) else value

    def reseed(self, layer: int, micro_batch: int) -> None:
        """Key torch's generators by what is computed, so that neither order nor cut changes a draw."""
        torch.manual_seed(counter_seed(self.resources.seed, self.step, micro_batch, layer))
