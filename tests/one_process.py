"""What one process makes of a job: it accumulates the micro-batches in their order and knows no stage.

A method that changes the training says so by a `Method`; `alone` asks it, and so do the ranks of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from convolutional_jobs import RunningStatistics
from equality_jobs import LOSSES, OPTIMIZERS, drop_out, samples
from small_jobs import SEED

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, LayerChoice
from weft.randomness import counter_seed
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.run.stage.documents import Documents
from weft.run.stage.layer_choices import apply_choices
from weft.run.stage.stage_module import frozen_names, rest
from weft.run.state.precision import PRECISIONS, STEPPED, at_least_fp32, lower_precision
from weft.run.workspace import inputs_of

# What a step tells, by name: the loss, and what methods tell of it.
Told = dict[str, list[float]]
# Micro-batches whose gradients are added up in their order; of a tuple the sums of its parts are.
Part = range | tuple["Part", ...]
# What every step told; and parameters, running statistics and masters by name.
Outcome = tuple[list[Told], dict[str, torch.Tensor]]
# What every layer gave, in their order.
Values = Sequence[torch.Tensor]
HELD_OUT = 100


class Method:
    """What a method asks of a plan and of a runtime, and what it changes of one process; this one nothing.

    Methods of rows are frozen dataclasses, in `tests/methods/rows/`.
    """

    choices: tuple[Choice, ...] = ()
    layer_choices: tuple[LayerChoice, ...] = ()
    sync: Choice | None = None
    runtime_options: ClassVar[Mapping[str, Any]] = {}
    # Whether every replica steps a model of its own.
    by_replica = False
    # Whether it decides how gradients of replicas are added up, and what of masters a model gets.
    by_share = False

    def added_loss(
        self, copy: Copy, values: Values, targets: torch.Tensor, told: Told
    ) -> torch.Tensor | float:
        """What is added to the loss of a micro-batch, from what every layer gave."""
        return 0.0

    def see(self, copy: Copy, gradients: Sequence[torch.Tensor], told: Told) -> None:
        """Look at the gradients of a micro-batch alone, those of the mean over the global batch."""

    def reduce(
        self, copy: Copy, step: int, addends: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """The sums of the gradients of replicas, for a method that is `by_share`."""
        raise NotImplementedError

    def publish(self, copy: Copy, step: int) -> None:
        """Bring the model up to date with its masters after a step, for a method that is `by_share`."""

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        """Change the gradients of a model that are about to be stepped with."""

    def begin(self, copies: Sequence[Copy]) -> Any:
        """What `after_step` remembers."""

    def rests(self, place: int, step: int) -> bool:
        """Whether the model with this place among all takes no step."""
        return False

    def see_all(self, copies: Sequence[Copy], step: int, told: Told) -> None:
        """Change what the models have told of a step together."""

    def after_step(self, copies: Sequence[Copy], step: int, begun: Any) -> None:
        """Change the models that have stepped."""

    def tell(self, told: Told, begun: Any) -> None:
        """Tell what `after_step` has found."""

    def settle(self, copies: Sequence[Copy]) -> None:
        """Give the first model what stands for all that differ, after the last step."""

    def attach(self, runtime: RankRuntime) -> None:
        """Give a rank of a plan what the job would."""

    def follow(self, runtime: RankRuntime, step: int) -> None:
        """Do on a rank of a plan what the job would after a step."""

    def check(self, runtime: RankRuntime) -> None:
        """Assert what else the method has left on a rank of a plan."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """All that the outcome depends on: equal for all rows that one process stands for.

    Attributes:
        reduce_precision: to which the gradient of every replica is rounded before they are added up.
        rounds_sums: whether their sum is rounded to it, too, as it is where every replica receives all of it.
    """

    model: ModelConfig
    micro_batch_size: int
    parts: Part
    precision: str
    reduce_precision: str | None = None
    rounds_sums: bool = False
    dropout: float
    loss: str
    masks: bool
    optimizer: str
    steps: int
    evaluates: bool
    methods: tuple[Method, ...]

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(choice for method in self.methods for choice in method.choices)


class Copy:
    """A model of one process, which goes back through its micro-batches and steps."""

    def __init__(self, training: Training, part: Part) -> None:
        config, computed = training.model, PRECISIONS[training.precision]
        self.training, self.part, self.graph = training, part, layer_graph(config)
        self.masters = build_stage(
            config, range(config.layers + 2), SEED, STEPPED[training.precision], methods=training.choices
        )
        rest(self.masters, STEPPED[training.precision])
        for method in training.methods:
            apply_choices(method.layer_choices, self.masters, range(config.layers + 2))
        self.model = self.masters
        self.by_share = next((method for method in training.methods if method.by_share), None)
        if computed != STEPPED[training.precision] or self.by_share is not None:
            self.model = deepcopy(self.masters)
            lower_precision(self.model.parameters(), computed)
        drop_out([self.model], training.dropout)
        self.statistics = RunningStatistics(self.model)
        self.optimizer = OPTIMIZERS[training.optimizer](self.masters)
        # Of all steps.
        self.learning_rates: list[float] = []

    @property
    def share(self) -> float:
        """Of all micro-batches."""
        return count(self.part) / count(self.training.parts)

    def step(self, step: int, told: Told) -> None:
        gradients = self.gradients(step, self.part, told)
        for parameter, gradient in zip(trained(self.masters), gradients, strict=True):
            parameter.grad = gradient / self.share
        for method in self.training.methods:
            method.before_step(self, step, told)
        self.learning_rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.masters.zero_grad()
        with torch.no_grad():
            if self.by_share is not None:
                self.by_share.publish(self, step)
            else:
                for parameter, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                    parameter.copy_(master)
        self.statistics.end_step()

    def gradients(self, step: int, part: Part, told: Told) -> list[torch.Tensor]:
        """Of the mean over the global batch, what these micro-batches have in it."""
        if isinstance(part, tuple):
            parts = [self.gradients(step, one, told) for one in part]
            if self.by_share is not None:
                return list(self.by_share.reduce(self, step, parts))
            return [self.reduced(same, part) for same in zip(*parts, strict=True)]
        own = trained(self.model)
        sums, losses = [torch.zeros_like(one) for one in trained(self.masters)], 0.0
        for number in part:
            loss, added = self.losses(step, number, told)
            (loss + added).backward()
            losses += loss.item()
            for total, parameter in zip(sums, own, strict=True):
                total += parameter.grad
            for method in self.training.methods:
                method.see(self, [one.grad for one in own], told)
            for one in own:
                one.grad = None
        told["loss"] = [told.get("loss", [0.0])[0] + losses]
        return sums

    def reduced(self, addends: Sequence[torch.Tensor], part: tuple[Part, ...]) -> torch.Tensor:
        """The sum of what the parts have of a gradient, as replicas send it to each other."""
        sent_as = PRECISIONS.get(self.training.reduce_precision or "")
        if sent_as is None or len(addends) == 1:
            return sum(addends)
        total = sum(one.to(sent_as).to(one.dtype) for one in addends)
        across_islands = not isinstance(part[0], range)
        rounded = self.training.rounds_sums or across_islands
        return total.to(sent_as).to(total.dtype) if rounded else total

    def losses(self, step: int, number: int, told: Told) -> tuple[torch.Tensor, Any]:
        """Of a micro-batch, and what methods add to it; both as the mean has them."""
        training, weight = self.training, 1.0 / count(self.training.parts)
        batch = samples(training.model, training, step, training.masks, training.choices)
        inputs, targets, *lengths = batch(number)
        if lengths:
            self.model.documents = Documents.of(lengths[0], inputs_of(inputs)[0].device)
        values: list[torch.Tensor] = []
        tensors = inputs_of(inputs)
        for layer, function in enumerate(self.model.layer_functions(tensors[0])):
            torch.default_generator.manual_seed(counter_seed(SEED, step, number, layer))
            read = [tensors[place] for place in self.graph.inputs_read[layer]]
            values.append(function(*read, *(values[one] for one in sorted(self.graph.feeders[layer]))))
        loss = LOSSES[training.loss](at_least_fp32(values[-1]), targets) * weight
        methods = training.methods if self.model.training else ()
        return loss, sum(weight * one.added_loss(self, values, targets, told) for one in methods)

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        losses = [self.losses(HELD_OUT, number, {})[0] for number in range(count(self.part))]
        self.model.train()
        return sum(losses).item()


def alone(rank: int, ranks: int, training: Training) -> Outcome:
    """What one process makes of it."""
    by_replica = any(method.by_replica for method in training.methods)
    parts = training.parts if by_replica else (training.parts,)
    copies, steps = [Copy(training, part) for part in parts], []
    begun = [method.begin(copies) for method in training.methods]
    for step in range(training.steps):
        told: Told = {}
        for place, copy in enumerate(copies):
            if not any(method.rests(place, step) for method in training.methods):
                copy.step(step, told)
        for method, state in zip(training.methods, begun, strict=True):
            method.see_all(copies, step, told)
            method.after_step(copies, step, state)
            method.tell(told, state)
        if training.evaluates:
            told["evaluated"] = [copies[0].evaluate()]
        steps.append(told)
    for method in training.methods:
        method.settle(copies)
    masters, model = copies[0].masters, copies[0].model
    kept = PRECISIONS[training.precision] != STEPPED[training.precision]
    left_out = frozen_names(masters)
    stepped_ones = {name: one for name, one in masters.state_dict().items() if name not in left_out}
    return steps, tensors_of(model) | (stepped(stepped_ones) if kept else {})


def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that have gradients."""
    return [one for one in module.parameters() if one.requires_grad]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and running statistics, copied."""
    kept = module.state_dict()
    statistics = {name: value for name, value in module.named_buffers() if name in kept}
    return {name: value.detach().clone() for name, value in (*module.named_parameters(), *statistics.items())}


def stepped(masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters under names of their own."""
    return {f"master of {name}": value.detach().clone() for name, value in masters.items()}


def count(part: Part) -> int:
    return len(part) if isinstance(part, range) else sum(count(one) for one in part)
