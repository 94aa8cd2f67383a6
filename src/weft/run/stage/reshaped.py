"""The form of a value that crosses to a stage with another number of tensor ranks.

Tensor ranks divide the tokens of the stream where their number divides the tokens. A message has the tokens
that its receiver holds. So a rank cuts its own tokens for several receivers, or gathers those of its
replica first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.describe.plan import Plan
from weft.run.parallel.tensor_parallel import TOKENS, TensorRanks


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The parts of a value for the ranks of another stage that receive it from this rank.

    Attributes:
        tensor: the tensor ranks of the own stage.
        gathers: True if its ranks gather their tokens first.
        parts: the equal parts of the tokens.
        of_receivers: the part of each receiver, in the order of its tensor ranks.
    """

    tensor: TensorRanks
    gathers: bool
    parts: int
    of_receivers: tuple[int, ...]

    @classmethod
    def between(
        cls, plan: Plan, stage: int, other: int, *, replica: int, tensor: TensorRanks
    ) -> Reshaped | None:
        """Return the form of values from a replica of `stage` to `other`; None if both have equally many
        tensor ranks."""
        # Where replicas of a stage have unlike numbers of ranks, each meets those of its own pipeline.
        replica = 0 if plan.has_like_replicas else replica
        ours, theirs = plan.shape(stage, replica), plan.shape(other, replica)
        size, lanes = ours.tensor_parallel, theirs.tensor_parallel
        if size == lanes:
            return None
        gathers = ours.sequence_parallel > theirs.sequence_parallel
        held = 1 if gathers else ours.sequence_parallel
        parts = theirs.sequence_parallel // held
        receivers = [lane for lane in range(lanes) if lane * size // lanes == tensor.place]
        if size > lanes:
            receivers = [lane for lane in receivers if lane * (size // lanes) == tensor.place]
        own = tensor.place * parts if held > 1 else 0
        divides = theirs.sequence_parallel > 1
        return cls(tensor, gathers, parts, tuple(lane - own if divides else 0 for lane in receivers))

    def of(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the part (b, own tokens, ...) of each receiver; all ranks of the replica call it."""
        whole = self.tensor.gather_tokens(value) if self.gathers else value
        cut = whole.chunk(self.parts, TOKENS)
        return [cut[part].contiguous() for part in self.of_receivers]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part of a value with this shape."""
        tokens = shape[TOKENS] * (self.tensor.size if self.gathers else 1) // self.parts
        return (*shape[:TOKENS], tokens, *shape[TOKENS + 1 :])
