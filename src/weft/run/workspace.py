"""`Workspace`: the values of one rank's instructions: modules, gradients, messages and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.program.kinds import SEND_ACTIVATION, SEND_GRADIENT
from weft.program.program import NONE, Columns
from weft.program.rank_program import RankProgram
from weft.randomness import counter_seed
from weft.run.accelerator import seed_generators, to_device
from weft.run.resources import Resources
from weft.run.stage.documents import Documents, Lengths, part_of
from weft.run.streams import THERE, Value

if TYPE_CHECKING:
    from weft.run.stage.segments import StageRun


class MicroBatch(NamedTuple):
    """The data behind a global micro-batch number, on the stage's device; only those that the stage reads.

    Inputs are in the stage's precision unless they are whole numbers.
    """

    inputs: tuple[torch.Tensor, ...] = ()
    targets: torch.Tensor | None = None
    documents: Documents | None = None


# The inputs of samples, one tensor or several, numbered from 0; all have the samples on the first axis.
Inputs = torch.Tensor | tuple[torch.Tensor, ...]
# Inputs and targets; of packed samples also the lengths of their documents.
Samples = tuple[Inputs, torch.Tensor] | tuple[Inputs, torch.Tensor, Lengths]


def inputs_of(read: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the inputs of samples by their numbers."""
    return (read,) if isinstance(read, torch.Tensor) else read


# A rank calls it only for micro-batches with inputs, targets or documents that its stages need.
Batch = Callable[[int], Samples]


# The key of a crossing value: its name, the activation's producing and reading stages, the message, and the
# rank that it goes to, NONE for a value that stays or has arrived.
Crossed = tuple[str, int, int, int, int]
# To which ranks a message (producer, consumer, number) goes.
Sent = Mapping[tuple[int, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Route:
    """The routes of values between stages: inside a rank, or to another one.

    `activations_sent` and `gradients_sent` have the messages that go to other ranks. The rank hands over
    every other value itself.
    """

    activations_sent: Sent
    gradients_sent: Sent

    @classmethod
    def of(cls, program: RankProgram) -> Route:
        return cls(
            activations_sent=messages_sent(program.columns, SEND_ACTIVATION),
            gradients_sent=messages_sent(program.columns, SEND_GRADIENT, ends=("part", "stage")),
        )


def messages_sent(columns: Columns, kind: int, ends: tuple[str, str] = ("stage", "part")) -> Sent:
    """Return the messages of a kind; `ends` are the columns of the producer and the consumer."""
    mine, found = columns.kind == kind, defaultdict[tuple[int, int, int], tuple[int, ...]](tuple)
    rows = (getattr(columns, name)[mine].tolist() for name in (*ends, "micro_batch", "peer"))
    # Every step of a cycle has the same messages.
    for producer, consumer, message, peer in dict.fromkeys(zip(*rows, strict=True)):
        found[producer, consumer, message] += (peer,)
    return found


_NOTHING = Value.of(MicroBatch())


@dataclass(kw_only=True)
class Workspace:
    """One program's values on one rank.

    Attributes:
        training: True keeps the values that backward passes need.
        micro_batch_weight: one over the micro-batches of the global batch, so that the losses add up to the
            global mean.
        gradient_weight: the factor of such a weighted loss in the gradient of a replica that steps by itself.
        step_shares: by step of a cycle, the share of the global batch that runs; replicas may rest in a step.
        values: by (name, stage, micro-batch). The reader of a micro-batch's value removes it. A value of a
            whole stage stays until it is replaced.
        crossed: the values that cross between stages and have not been read.
        segments: the stages with cut passes.
        last_gradients: positions of the computations that complete a stage's gradient.
        step, batch: those of the step that is being issued.
        losses: this rank's shares of the step's loss, in order.
    """

    resources: Resources
    route: Route
    training: bool
    micro_batch_weight: float
    gradient_weight: float = 1.0
    step_shares: tuple[float, ...] = (1.0,)
    values: dict[tuple[str, int, int], Value[Any]] = field(default_factory=dict)
    crossed: dict[Crossed, Value[torch.Tensor]] = field(default_factory=dict)
    segments: Mapping[int, StageRun] = field(default_factory=dict)
    last_gradients: frozenset[int] = frozenset()
    step: int = 0
    batch: Batch | None = None
    losses: list[Value[torch.Tensor]] = field(default_factory=list)

    def begin(self, step: int, batch: Batch) -> None:
        self.step, self.batch = step, batch
        self.losses.clear()

    @property
    def step_share(self) -> float:
        """The share of the global batch that runs in this step."""
        return self.step_shares[self.step % len(self.step_shares)]

    def loss_factor(self) -> float | torch.Tensor:
        """Return the factor of losses in the gradients of the pass that runs now; a tensor has shape ()."""
        factors = (one.loss_factor() for one in self.resources.methods.values())
        # `math.prod` would read tensors.
        return reduce(mul, factors, 1.0)

    def loss_gradient(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that the backward pass of a weighted loss begins with; None for 1."""
        weight = self.gradient_weight * self.loss_factor()
        if isinstance(weight, torch.Tensor):
            return weight.to(loss).expand_as(loss)
        return None if weight == 1.0 else torch.full_like(loss, weight)

    def micro_batch(
        self, number: int, splits: int = 1, *, inputs: Sequence[int], targets: bool, begins: bool = True
    ) -> Value[MicroBatch]:
        """Begin to load one of a stage's own micro-batches: the stage splits each of the batch in `splits`.

        `inputs` are the numbers of the inputs that the stage reads, `targets` whether it reads targets. A
        pass that `begins` also needs the documents of packed samples.
        """
        packed = begins and self.resources.packed
        if not inputs and not targets and not packed:
            return _NOTHING
        assert self.batch is not None, "a step begins with its batch"
        whole, part = divmod(number, splits)
        read, asked, *documents = self.batch(whole)
        lengths = part_of(documents[0], splits, part) if packed else None
        tensors = inputs_of(read)
        # Lists, here and below: a generator costs more than an instruction's other values.
        own = tuple([_part(tensors[place], splits, part) for place in inputs])
        given = own, _part(asked, splits, part) if targets else None, lengths
        stream = self.resources.streams.loading
        if stream is None:
            return Value.of(self._on_device(*given))
        loaded: Value[MicroBatch] = Value()

        def load() -> None:
            loaded.content = self._on_device(*given)

        loaded.completion = stream.run(f"micro-batch {number}", load)
        return loaded

    def _on_device(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, lengths: Lengths | None
    ) -> MicroBatch:
        device, dtype = self.resources.device, self.resources.dtype
        inputs = tuple([_as_computed(to_device(one, device), dtype) for one in inputs])
        documents = None if lengths is None else Documents.of(lengths, device)
        return MicroBatch(inputs, None if targets is None else to_device(targets, device), documents)

    def latest(self, name: str, stage: int) -> Value[Any]:
        """Return the latest value of a stage under this name."""
        return self.values.get((name, stage, NONE), THERE)

    def reseed(self, step: int, layer: int, micro_batch: int) -> None:
        """Key torch's generators by the computation, so that neither order nor cut changes a draw."""
        seed_generators(counter_seed(self.resources.seed, step, micro_batch, layer), self.resources.device)


def _part(whole: torch.Tensor, splits: int, part: int) -> torch.Tensor:
    return whole if splits == 1 else whole.tensor_split(splits)[part]


def _as_computed(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
