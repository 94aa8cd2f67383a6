"""The rules that refuse products in 8 bits where they would not train like one process, or cost more.

A scale belongs to the tokens that one product multiplies. So ranks and stages that divide the tokens of a
micro-batch would scale them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from weft.describe.amount import Shape
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import Violation
from weft.methods.fp8_linears.options import NAME
from weft.methods.fp8_linears.products import MULTIPLE, converted
from weft.moves.composition import Composition
from weft.program.schedules import splits_backward
from weft.run.supported import NeededPackage

TENSOR = "tensor ranks multiply parts of a weight, with layers of weft's own that are not converted"
CONTEXT = "context ranks would scale their tokens apart"
SPLITS = "stages that split micro-batches would scale the parts apart"
BACKWARD = (
    "torchao computes both gradients of a product together, and a split backward pass would do so twice"
)
TOKENS = f"the tokens of a micro-batch, over which gradients of weights add up, are no multiple of {MULTIPLE}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """The part of a layout or plan that the rules read."""

    choices: tuple[LayerChoice, ...]
    graph: LayerGraph
    shape: Shape
    splits: bool
    schedule: str
    pp: int

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield (key of a layout, key of a plan, reason, nearest valid value)."""
        layers = [layer for choice in self.choices if choice.name == NAME for layer in choice.layers]
        if not layers:
            return
        if self.shape.tensor_parallel > 1:
            yield "tp", "mesh.tp", TENSOR, "1"
        if self.shape.context_parallel > 1:
            yield "cp", "mesh.cp", CONTEXT, "1"
        if self.splits:
            yield "splits", "stages", SPLITS, "1"
        if splits_backward(self.schedule, self.pp):
            yield "schedule", "schedule", BACKWARD, "1f1b"
        products = [one for layer in layers for one in converted(self.graph.layers[layer])]
        rows = gcd(MULTIPLE, *(int(one.rows(self.shape)) for one in products))
        if rows < MULTIPLE:
            size = str(self.shape.micro_batch_size * MULTIPLE // rows)
            yield "micro-batch size", "micro_batch_size", TOKENS, size


def _of_layout(job: Job, layout: Layout) -> str | None:
    # Planners ask for every layout of a job.
    if not any(choice.name == NAME for choice in job.layer_choices):
        return None
    shape = Shape(layout.micro_batch_size, job.sequence, layout.tp, layout.cp)
    splits = any(one > 1 for one in layout.splits or ())
    asked = _Asked(job.layer_choices, job.graph, shape, splits, layout.schedule, layout.pp)
    found = next(asked.problems(), None)
    if found is None:
        return None
    key, _, reason, near = found
    return f"{NAME}: {reason}; nearest {key}: {near}"


def _of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    shape = Shape(plan.micro_batch_size, plan.sequence, max(plan.tensor_degrees), plan.cp, plan.ep)
    splits = any(stage.splits > 1 for stage in plan.stages)
    asked = _Asked(plan.layer_choices, graph, shape, splits, plan.schedule.name, plan.pp)
    for _, key, reason, near in asked.problems():
        yield Violation(f"plan: {key}", f"{NAME}: {reason}", near)


RULES = (
    Composition(
        method=NAME,
        other="tensor and context parallelism, split micro-batches, split backward passes",
        reason="weft's divided layers are not converted; a scale belongs to all tokens of a micro-batch; "
        "torchao computes both gradients of a product together",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_of_plan),
    NeededPackage(choice=NAME, package="torchao", extra="fp8"),
)
