"""Plans of every kind that emitters tell apart, and the files that they write for one stack.

No search: each plan is a layout that is built, so that the same files come out every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.describe.layout import Layout
from weft.describe.plan import Replica
from weft.describe.run_file import changed, run_of_keywords
from weft.doors.emit import OWN_RUNS, emit
from weft.doors.emit.base import Emitted
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import problem_of_run
from weft.run.supported import unsupported

SIXTEEN = "16xa100-80gb"


# Without these, the files hold placeholders, which stacks refuse.
CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "train": {"steps": 200},
    "optimizer": {"learning_rate": 3e-4, "clip_norm": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.95)},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a model on a cluster; `shares` are micro-batches of each replica, where they differ."""

    model: str = "llama-3-8b"
    cluster: str = SIXTEEN
    global_batch: int = 64
    precision: str = "bf16"
    layout: Mapping[str, Any] = field(default_factory=dict)
    shares: tuple[int, ...] | None = None

    def planned(self) -> PlannedJob:
        run = run_of_keywords(
            model=self.model,
            on=self.cluster,
            global_batch=self.global_batch,
            precision=self.precision,
            sequence=None,
            pins={},
        )
        run = changed(run, CHOSEN)
        problem = problem_of_run(run)
        one: dict[str, Any] = {
            "pp": 1,
            "dp": 1,
            "loops": 1,
            "micro_batch_size": 1,
            "schedule": "1f1b",
        }
        # Embedding and head as light as nothing: stages have equally many blocks where they can.
        weights = [1.0 if layer.kind == "block" else 1e-6 for layer in problem.job.graph.layers]
        plan = build_plan(problem.job, Layout(**(one | dict(self.layout))), weights)
        if self.shares is not None:
            [stage] = plan.stages
            replicas = tuple(
                Replica(ranks=copy.ranks, micro_batches=share)
                for copy, share in zip(stage.replicas, self.shares, strict=True)
            )
            plan = plan.model_copy(update={"stages": (stage.model_copy(update={"replicas": replicas}),)})
        return PlannedJob(run=run, problem=problem, plan=plan)


_PIPELINE = {"pp": 4, "dp": 4, "sharding": "zero-1"}
_LOOPED = _PIPELINE | {"loops": 2, "schedule": "depth-first"}
_REPLICAS = {"dp": 16}
CASES: Mapping[str, Case] = {
    "one device": Case(model="gpt2", cluster="1xa100-80gb"),
    "replicas": Case(layout=_REPLICAS),
    "replicas, zero-1": Case(layout=_REPLICAS | {"sharding": "zero-1"}),
    "replicas, zero-2": Case(layout=_REPLICAS | {"sharding": "zero-2"}),
    "replicas, zero-3": Case(layout=_REPLICAS | {"sharding": "zero-3"}),
    "islands, zero-3": Case(layout=_REPLICAS | {"sharding": "zero-3", "island": 8}),
    "islands, zero-1": Case(layout=_REPLICAS | {"sharding": "zero-1", "island": 8}),
    "layers in loops": Case(
        layout=_REPLICAS | {"sharding": "zero-3", "loops": 4, "schedule": "breadth-first"}
    ),
    "tensor": Case(layout={"dp": 8, "tp": 2}),
    "tensor, zero-1": Case(layout={"dp": 8, "tp": 2, "sharding": "zero-1"}),
    "tensor, zero-3": Case(layout={"dp": 8, "tp": 2, "sharding": "zero-3"}),
    "context": Case(layout={"dp": 8, "cp": 2, "sharding": "zero-3"}),
    "context, zero-1": Case(layout={"dp": 8, "cp": 2, "sharding": "zero-1"}),
    "pp x dp x tp": Case(layout={"pp": 2, "dp": 2, "tp": 4, "sharding": "zero-1"}),
    "pp x dp, zero-0": Case(layout=_PIPELINE | {"sharding": "zero-0"}),
    "pp x dp, zero-2": Case(layout=_PIPELINE | {"sharding": "zero-2"}),
    "pp x dp, zero-3": Case(layout=_PIPELINE | {"sharding": "zero-3"}),
    "pp x dp, islands": Case(layout=_PIPELINE | {"island": 2}),
    "pp x dp x cp": Case(layout=_PIPELINE | {"dp": 2, "cp": 2}),
    "gpipe": Case(layout=_PIPELINE | {"schedule": "gpipe"}),
    "depth-first": Case(layout=_LOOPED),
    "depth-first, groups": Case(layout=_LOOPED | {"options": {"group_size": 8}}),
    "breadth-first": Case(layout=_LOOPED | {"schedule": "breadth-first"}),
    "breadth-first, rest": Case(global_batch=24, layout=_LOOPED | {"schedule": "breadth-first"}),
    "hybrid": Case(layout=_LOOPED | {"schedule": "hybrid", "options": {"depth": 2}}),
    "few micro-batches": Case(global_batch=8, layout=_LOOPED | {"schedule": "breadth-first"}),
    "zb-v": Case(layout=_LOOPED | {"schedule": "zb-v"}),
    "zb-h1": Case(layout=_PIPELINE | {"schedule": "zb-h1"}),
    "recompute selective": Case(layout=_PIPELINE | {"recompute": "selective"}),
    "recompute full": Case(layout=_PIPELINE | {"recompute": "full"}),
    "recompute per stage": Case(
        layout=_PIPELINE | {"recompute": "full", "recompute_per_stage": ("full", "selective", "none", "none")}
    ),
    "recompute full, zero-3": Case(layout=_REPLICAS | {"sharding": "zero-3", "recompute": "full"}),
    "recompute selective, zero-3": Case(layout=_REPLICAS | {"sharding": "zero-3", "recompute": "selective"}),
    "uneven stages": Case(cluster="8xa100-80gb+4xa100-80gb", global_batch=48, layout=_PIPELINE | {"pp": 3}),
    "uneven stages in loops": Case(layout=_LOOPED | {"loops": 3}),
    "uneven cluster": Case(cluster="16xa100-80gb+8xh100-80gb", global_batch=48, layout={"dp": 24}),
    "unequal shares": Case(cluster="2xa100-80gb", layout={"dp": 2}, shares=(40, 24)),
    "fp32": Case(precision="fp32", layout=_REPLICAS | {"sharding": "zero-1"}),
    "fp16": Case(precision="fp16", layout=_REPLICAS | {"sharding": "zero-1"}),
    "gpt2 pp": Case(model="gpt2", layout=_PIPELINE),
    "llama-7b": Case(model="llama-7b", layout=_PIPELINE),
    "processors": Case(
        model="gpt-1m", cluster="this-machine", global_batch=8, precision="fp32", layout={"dp": 2}
    ),
    "bert": Case(model="bert-base", layout=_REPLICAS | {"sharding": "zero-3"}),
}


def emitted_for(stack: str) -> tuple[dict[str, tuple[Case, Emitted]], dict[str, str]]:
    """What is emitted for a stack, and the line of the plans that are refused, by the names of the cases."""
    written: dict[str, tuple[Case, Emitted]] = {}
    refused: dict[str, str] = {}
    for name, case in CASES.items():
        planned = case.planned()
        try:
            if stack in OWN_RUNS and (problems := unsupported(planned.plan)):
                raise InputError(problems)
            written[name] = (case, emit(planned, stack))
        except InputError as error:
            refused[name] = str(error).splitlines()[0]
    return written, refused
