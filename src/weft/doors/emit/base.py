"""The common parts of emitters: a plan's decisions in the form of other stacks, and an emitter's result."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.bundles import parts
from weft.describe.added_layers import adds_layers
from weft.describe.layout import USUAL, Layout
from weft.describe.layout_text import decision_text
from weft.describe.model import ModelConfig
from weft.describe.optimizers import KNOWN_OPTIMIZERS
from weft.describe.plan import Plan
from weft.describe.run_file import RunFile
from weft.errors import InputError, Violation
from weft.moves.layout_of_plan import usual_layout_of
from weft.planning.planned_job import PlannedJob
from weft.predict.cost.residency import KeptAway
from weft.program.schedules.depth_first import DepthFirst

# The address of the first node in a stack's launch line.
MASTER = '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port 29500'

# The optimizers that every stack has, or replaces by name.
NAMED_OPTIMIZERS = ("adamw", "adam", "sgd")


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a plan that a stack cannot express, and the nearest that it can do."""

    what: str
    nearest: str

    def __str__(self) -> str:
        return f"lost: {self.what}; nearest: {self.nearest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A plan in the words of another stack.

    `text` is the file and `file` a usual name for it. `launch` is the command that starts the run with it.
    `losses` are the parts of the plan that the stack cannot express.
    """

    file: str
    text: str
    launch: str
    losses: tuple[Loss, ...] = ()

    def launch_from(self, out: Path) -> str:
        """Return the command for a file in `out`; it names a module of Python without its folder."""
        if not self.file.endswith(".py"):
            return self.launch.replace(self.file, str(out))
        line = self.launch.replace("PYTHONPATH=. ", f"PYTHONPATH={shlex.quote(str(out.parent))} ")
        return line.replace(f"--module {self.file.removesuffix('.py')} ", f"--module {out.stem} ")


@dataclass(frozen=True)
class Decided:
    """The decisions of a planned job, for stacks that know one degree of each axis for all stages.

    Where stages or replicas differ, the values are the nearest equal ones, and `inequalities` lists the
    losses.
    """

    job: PlannedJob

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def run(self) -> RunFile:
        return self.job.run

    @property
    def model(self) -> ModelConfig:
        return self.job.problem.model

    def chosen(self, table: str, key: str, otherwise: Any) -> Any:
        """Return the value that somebody gave to a key of the run file, else a stack's placeholder."""
        return getattr(getattr(self.run, table), key) if self.run.chose(table, key) else otherwise

    @property
    def final_share(self) -> float:
        """The learning rate at the end of its decay, as a share of the highest."""
        optimizer = self.run.optimizer
        return (optimizer.final_learning_rate or 0.0) / optimizer.learning_rate

    @cached_property
    def layout(self) -> Layout:
        """The homogeneous layout nearest to the plan."""
        return usual_layout_of(self.plan)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step of one pipeline, if all have equally many."""
        return max(1, round(self.plan.micro_batches / self.layout.dp))

    @property
    def global_batch(self) -> int:
        """Samples per step, if all pipelines have equally many micro-batches."""
        return self.micro_batches * self.layout.dp * self.plan.micro_batch_size

    @property
    def decisions(self) -> dict[str, Any]:
        """The layout's decisions by name, without the samples of a micro-batch, which belong to the batch."""
        return {name: value for name, value in self.layout.record().items() if name not in self.batch}

    @property
    def batch(self) -> dict[str, int]:
        """Counts of samples and of their tokens, by name."""
        return {
            "micro_batch_size": self.plan.micro_batch_size,
            "micro_batches": self.micro_batches,
            "global_batch": self.global_batch,
            "sequence": self.plan.sequence,
        }

    @property
    def blocks(self) -> list[int]:
        """The number of blocks, without embedding and head, of each stage."""
        layers = self.job.problem.job.graph.layers
        return [sum(layers[index].kind == "block" for index in stage.layers) for stage in self.plan.stages]

    @cached_property
    def node_sizes(self) -> list[int]:
        """Ranks of each node, in the order of the cluster's groups."""
        sizes, left = [], self.layout.ranks
        for group in self.job.problem.job.cluster.groups:
            for _ in range(group.count):
                if left > 0:
                    sizes.append(min(group.devices, left))
                    left -= sizes[-1]
        return sizes

    @property
    def devices_per_node(self) -> int:
        """Ranks that one launcher starts on a node of the first group."""
        return self.node_sizes[0]

    @property
    def nodes(self) -> int:
        return len(self.node_sizes)

    @property
    def on_processors(self) -> bool:
        """True if no device of the cluster is an accelerator."""
        return all(group.device.synchronous for group in self.job.problem.job.cluster.groups)

    def torchrun(self, program: str) -> str:
        """Return the command that starts `program` on every node."""
        if self.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.devices_per_node} {program}"
        sizes = f"--nnodes {self.nodes} --nproc-per-node {self._ranks_here()}"
        return f"torchrun {sizes} {MASTER} {program}"

    def _ranks_here(self) -> str:
        """Return the ranks of a node, as shell: a number, or a choice by node where nodes differ."""
        if len(set(self.node_sizes)) == 1:
            return str(self.devices_per_node)
        sizes = " ".join(map(str, self.node_sizes))
        return f'"$(set -- {sizes}; shift "${{NODE_RANK:-0}}"; echo "$1")"'

    def summary(self) -> list[str]:
        """Return two lines: the name of the plan, and its decisions."""
        job = self.job.problem.job
        return [
            f"weft plan {self.plan.plan_id}: {job.graph.name} on {job.cluster.name}",
            f"{self.layout}, global batch {self.plan.global_batch}, {self.plan.sequence} tokens per sample",
        ]

    @property
    def optimizer(self) -> str:
        """The run's optimizer, or AdamW in place of one that no stack's file can name."""
        name = self.run.optimizer.name
        return name if name in NAMED_OPTIMIZERS else "adamw"

    def optimizer_losses(self) -> list[Loss]:
        """Return the loss of an optimizer that no stack's file can name."""
        name = self.run.optimizer.name
        owner = "weft" if name in KNOWN_OPTIMIZERS else "another package"
        return [] if name in NAMED_OPTIMIZERS else [Loss(f"optimizer {name} of {owner}", "AdamW")]

    def reduction_losses(self, stack: str, *, told: Collection[str] = ("fp32",)) -> list[Loss]:
        """Return the loss of the precision of reductions, unless a stack's file says it."""
        reduced = self.plan.reduce_precision
        if reduced is None or reduced in told:
            return []
        return [Loss(f"gradients reduced in {reduced}, which {stack} is not told", "its usual reductions")]

    @property
    def _at_a_time(self) -> int:
        """Micro-batches that a stage on a single device runs before the next stage does."""
        if self.layout.schedule == DepthFirst.name:
            return int(self.layout.options.get("group_size", 1))
        return self.micro_batches

    def inequalities(self, stack: str) -> list[Loss]:
        """Return the losses where all stages and replicas must be alike, with the model's own layers only."""
        plan, layout = self.plan, self.layout
        losses = [
            Loss(
                f"{choice.name}, which is no part of the model; {stack} does not train it", "the model alone"
            )
            for choice in plan.methods
            if adds_layers(choice)
        ]
        losses += [
            Loss(
                f"{name} of single layers; {stack} is told nothing of it", "all layers as the model has them"
            )
            for name in sorted({choice.name for choice in plan.layer_choices})
        ]
        losses += [
            Loss(f"{one.what}; {stack} is told nothing of it", "everything on the devices")
            for one in parts(KeptAway)
            if any(one.stages(plan.methods, len(plan.stages)))
        ]
        if plan.launch != "eager":
            losses.append(Loss(f"{plan.launch} layers; {stack} is told nothing of it", "eager layers"))
        if layout.splits:
            what = f"stages that split micro-batches in {_listed(layout.splits)}"
            losses.append(Loss(f"{what}; {stack} runs them whole", "whole micro-batches"))
        if layout.pp == 1 and layout.loops > 1 and self._at_a_time > 1:
            what = f"layers that run {self._at_a_time} micro-batches before the next one ({layout.schedule})"
            losses.append(
                Loss(f"{what}; {stack} runs one after the other", "weights gathered for each of them")
            )
        shares = [copy.micro_batches for copy in plan.stages[0].replicas]
        if len(set(shares)) > 1:
            what = f"replicas take {_listed(shares)} micro-batches; {stack} gives all of them equally many"
            losses.append(Loss(what, f"{self.micro_batches} each, global batch {self.global_batch}"))
        counts = [len(stage.replicas) for stage in plan.stages]
        if len(set(counts)) > 1:
            what = f"stages have {_listed(counts)} replicas; {stack} has as many of every stage"
            losses.append(Loss(what, f"{layout.dp} of every stage"))
        widths = [len(copy.ranks) for stage in plan.stages for copy in stage.replicas]
        if len(set(widths)) > 1:
            what = f"replicas have {_listed(sorted(set(widths)))} ranks; {stack} has one degree for all"
            losses.append(Loss(what, f"tensor degree {layout.tp}"))
        recomputes = {stage.recompute for stage in plan.stages}
        if len(recomputes) > 1:
            what = f"stages recompute {_listed(sorted(recomputes))}; {stack} recomputes alike in all"
            losses.append(Loss(what, f"{layout.recompute} in all"))
        return losses


def unexpressed(layout: Layout, stack: str, expressed: Collection[str]) -> list[Loss]:
    """Return a line for each unusual decision that a stack has no word for, that is, not in `expressed`."""
    return [
        Loss(
            f"{decision_text(name, getattr(layout, name))}, which {stack} does not have",
            decision_text(name, USUAL[name]),
        )
        for name in layout.unusual
        if name not in expressed
    ]


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, ..."


def require_family(model: ModelConfig, stack: str, families: Sequence[str]) -> None:
    """Refuse a model without a counterpart in a stack.

    Raises:
        InputError: with the families that the stack has.
    """
    if model.family not in families:
        problem = (
            f"weft writes files of {stack} for models of {' and '.join(families)}, not of {model.family}"
        )
        raise InputError(Violation("--emit", problem, "slurm"))
    if model.decoder is not None and model.decoder != replace(model, decoder=None).architecture:
        problem = f"{stack} trains the plain {model.family}, not the biases, heads or norms of {model.name}"
        raise InputError(Violation("--emit", problem, "slurm"))


def commented(lines: Sequence[str]) -> str:
    """Return lines as comments of shell, TOML and YAML."""
    return "".join(f"# {line}\n" for line in lines)


def header(decided: Decided, launch: str, losses: Sequence[Loss]) -> str:
    """Return the comment at the top of a file: the plan, the launch command, and the losses."""
    return commented([*decided.summary(), f"start: {launch}", *(str(loss) for loss in losses)])
