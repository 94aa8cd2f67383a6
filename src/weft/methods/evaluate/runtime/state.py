"""`BubbleEvaluation`: copies of a rank's stages, and the evaluation that is under way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.errors import InputError, Violation
from weft.methods.bubble_filling.step_works import WorksInSteps
from weft.methods.evaluate.kinds import HELD_OUT_FORWARD, SEND_HELD_OUT
from weft.methods.evaluate.sizes import NAME, most_micro_batches
from weft.run.methods import Counter, Making, MethodState, PartOfSum
from weft.run.resources import LossFunction, Resources
from weft.run.streams import Value
from weft.run.workspace import Batch, Route, Samples, Workspace, messages_sent

# The room in checkpoints for the sums of metrics, as JSON.
METRICS_BYTES = 4096
_NONE = -1


class _Counted:
    """A loss function that adds to the metrics of an evaluation; all else is that of the function."""

    def __init__(self, state: BubbleEvaluation, loss_function: LossFunction) -> None:
        self._state, self._loss_function = state, loss_function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss_function, name)

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        with self._state.counting():
            return self._loss_function(outputs, targets)


class BubbleEvaluation(MethodState):
    """The evaluations of a rank, as `weft.run.methods.EvaluationBeside`.

    Their passes run in copies of its stages, which never train.

    Attributes:
        copies: by stage, the module with the weights that are evaluated.
    """

    def __init__(self, making: Making) -> None:
        owed, columns = making.program.obligations.methods[NAME], making.program.columns
        assert isinstance(owed, WorksInSteps), "the method's pass has this obligation"
        self.copies: dict[int, nn.Module] = {}
        self.steps = 0
        self.begun: int | None = None
        self._program = making.program
        self._pieces = owed.rows[-1].pieces
        self._each = making.plan.stages[0].replicas[0].micro_batches
        self._most = most_micro_batches(making.plan)
        # Of the replica: its first micro-batch of each batch, and its first piece of each step.
        self._first = int(columns.micro_batch[columns.kind == HELD_OUT_FORWARD].min())
        self._originals: Mapping[int, nn.Module] = {}
        self._batches: Sequence[Batch] = ()
        self._counter: Counter | None = None
        self._inner: Workspace | None = None
        # Of the micro-batches so far, in order; a rank without the last stage has none.
        self._losses: list[Value[torch.Tensor]] = []
        self._rooms: dict[str, torch.Tensor] = {}

    def begin(self, resources: Resources) -> None:
        self._originals = resources.stages
        for stage, module in resources.stages.items():
            if resources.statistics[stage].collects:
                problem = f"stage {stage} collects running statistics, which replicas average between steps"
                raise InputError(Violation("bubble.work", problem, "without evaluate"))
            self.copies[stage] = deepcopy(module).eval().requires_grad_(False)

    @property
    def evaluation(self) -> BubbleEvaluation:
        return self

    def inner(self, workspace: Workspace) -> Workspace:
        """Return the values of held-out passes, apart from those of training."""
        if self._inner is None:
            self._inner = Workspace(
                resources=replace(
                    workspace.resources,
                    stages=self.copies,
                    loss_function=_Counted(self, workspace.resources.loss_function),
                ),
                route=Route(messages_sent(self._program.columns, SEND_HELD_OUT), {}),
                training=False,
                micro_batch_weight=workspace.micro_batch_weight,
            )
        return self._inner

    def copies_weights(self, step: int) -> bool:
        """Return True if an evaluation of the weights before this step begins with it."""
        return step == self.begun

    def copy(self, stage: int) -> None:
        """Copy the weights of a stage, as they are now."""
        own, original = self.copies[stage], self._originals[stage]
        with torch.no_grad():
            for one, other in (
                (own.parameters(), original.parameters()),
                (own.buffers(), original.buffers()),
            ):
                for copied, tensor in zip(one, other, strict=True):
                    copied.copy_(tensor)

    def batch_of(self, step: int, number: int) -> Batch | None:
        """Return the data of a piece of a step; None: no evaluation needs the piece.

        Args:
            number: of the piece, as in its instruction.
        """
        if self.begun is None or not 0 <= step - self.begun < self.steps:
            return None
        place = (step - self.begun) * self._pieces + number - self._first
        batch, within = divmod(place, self._each)
        if batch >= len(self._batches):
            return None
        whole, micro_batch = self._batches[batch], self._first + within

        def read(_: int) -> Samples:
            return whole(micro_batch)

        return read

    def counting(self) -> AbstractContextManager[None]:
        """Enter a block with passes that add to the metrics."""
        return nullcontext() if self._counter is None else self._counter.counting()

    def keep(self, losses: Sequence[Value[torch.Tensor]]) -> None:
        """Keep the losses of the latest piece."""
        self._losses += losses

    def prepare(self, batches: Sequence[Batch], counter: Counter) -> None:
        self._batches, self._counter = batches, counter
        self.steps = -(-len(batches) * self._each // self._pieces)
        if self.begun is not None:
            sums, micro_batches = json.loads(bytes(self._rooms["metrics"].tolist()).rstrip(b"\0"))
            counter.go_on(sums, micro_batches)
        self._rooms.clear()

    def start(self, done: int) -> None:
        self.begun = done
        self._losses.clear()

    def take_shares(self) -> list[float]:
        values, each = self._losses, self._each
        for one in values:
            one.completion.wait()
        shares = [
            PartOfSum(tuple(values[first * each : (first + 1) * each])).read()
            for first in range(len(self._batches))
        ]
        self.begun = None
        self._losses.clear()
        return shares

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        if self._counter is None:
            # A checkpoint may fill it, before the first step.
            self._rooms = {
                "begun": torch.tensor(_NONE),
                "count": torch.tensor(0),
                "losses": torch.zeros(self._most, dtype=torch.float64),
                "metrics": torch.zeros(METRICS_BYTES, dtype=torch.uint8),
            }
            return self._rooms | dict(self._weights())
        if self.begun is None:
            return {}
        for one in self._losses:
            one.completion.wait()
        found = [one.content.item() for one in self._losses]
        metrics = json.dumps(self._counter.counted).encode().ljust(METRICS_BYTES, b"\0")
        return {
            "begun": torch.tensor(self.begun),
            "count": torch.tensor(len(found)),
            "losses": torch.tensor(found + [0.0] * (self._most - len(found)), dtype=torch.float64),
            "metrics": torch.frombuffer(bytearray(metrics), dtype=torch.uint8),
            **dict(self._weights()),
        }

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stage, module in self.copies.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                yield f"weights/{stage}/{name}", tensor.detach()

    def resume(self) -> None:
        if self._rooms and self._rooms["begun"] != _NONE:
            self.begun = int(self._rooms["begun"])
            kept = self._rooms["losses"][: int(self._rooms["count"])]
            self._losses = [Value.of(one) for one in kept]

    def rebase(self) -> None:
        self.begun = None
        self._losses.clear()
