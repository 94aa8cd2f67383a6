"""Law: stages that form a graph, also with micro-batches of their own sizes, train like one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pool import WorkerPool
from small_jobs import SEED, descent

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.errors import InputError
from weft.planning.compile import compile_plan
from weft.program.rank_program import part_of
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements
from weft.program.verify import require_valid
from weft.run.borders import require_plain
from weft.run.runtime import RankRuntime
from weft.run.stages import build_stages

pytestmark = pytest.mark.processes

STEPS = 2
MICRO_BATCH = 4
Outcome = tuple[list[float], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A layout of a model whose layers form a graph; `loops` stages on each device."""

    model: str = "diamond"
    schedule: str = "1f1b"
    cut: tuple[tuple[int, ...], ...] = ((0,), (1, 2), (3, 4), (5,))
    splits: tuple[int, ...] = (1, 1, 1, 1)
    loops: int = 1
    dp: int = 1
    micro_batches: int = 3
    recompute: str = "none"

    def __str__(self) -> str:
        return f"{self.model} {self.schedule} {self.splits} x{self.dp} {self.recompute} {self.loops}"

    @property
    def config(self) -> ModelConfig:
        return resolve_model(f"own_models:{self.model}")

    @property
    def plan(self) -> Plan:
        graph, stages = layer_graph(self.config), len(self.cut)
        pipeline = Pipeline(stages // self.loops, stages, self.micro_batches)
        [devices] = placements(get_schedule(self.schedule), pipeline)
        return Plan(
            model=graph.name,
            model_fingerprint=graph.fingerprint,
            cluster="test",
            cluster_fingerprint="0" * 16,
            sequence=graph.sequence,
            global_batch=MICRO_BATCH * self.micro_batches * self.dp,
            micro_batch_size=MICRO_BATCH,
            precision="fp64",
            mesh={"pp": pipeline.devices, "dp": self.dp},
            stages=tuple(
                Stage(
                    layers=layers,
                    replicas=tuple(
                        Replica(ranks=(int(device) * self.dp + copy,), micro_batches=self.micro_batches)
                        for copy in range(self.dp)
                    ),
                    recompute=self.recompute,
                    splits=splits,
                )
                for layers, splits, device in zip(self.cut, self.splits, devices, strict=True)
            ),
            schedule=Choice(name=self.schedule),
        )


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    labels = torch.randint(10, (MICRO_BATCH,), generator=generator)
    return torch.randn(MICRO_BATCH, 1, 8, 8, generator=generator, dtype=torch.float64), labels


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, targets)


def alone(case: Case) -> Outcome:
    """One process that runs the layers one after the other and knows no stage."""
    plan, graph = case.plan, layer_graph(case.config)
    whole = plan.model_copy(
        update={
            "stages": (
                Stage(
                    layers=tuple(range(len(graph.layers))), replicas=(Replica(ranks=(0,), micro_batches=1),)
                ),
            )
        }
    )
    [model] = build_stages(whole, case.config, 0, SEED, torch.float64).values()
    optimizer, losses = descent(model), []
    for step in range(STEPS):
        total = 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(step, number)
            values: list[torch.Tensor] = []
            for index, layer in enumerate(model.layers.values()):
                given = [values[feeder] for feeder in sorted(graph.feeders[index])] or [inputs]
                values.append(layer(*given))
            loss = loss_of(values[-1], targets) / plan.micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(rank: int, ranks: int, case: Case) -> Outcome:
    plan = case.plan
    program = compile_plan(plan, layer_graph(case.config))
    runtime = RankRuntime(
        plan,
        part_of(program, rank),
        build_stages(plan, case.config, rank, SEED, torch.float64),
        loss_of,
        descent,
        device="cpu",
        seed=SEED,
    )
    losses = [runtime.step(step, lambda number, step=step: batch(step, number)).loss for step in range(STEPS)]
    found = {
        name: value.detach().clone()
        for module in runtime.stages.values()
        for name, value in module.named_parameters()
    }
    runtime.close()
    return losses, found


CROSSED = ((0,), (1, 2), (3,), (4,))
CASES = (
    Case(schedule="gpipe"),
    Case(recompute="full"),
    Case(schedule="zb-h1"),
    Case(schedule="breadth-first", loops=2, recompute="selective"),
    Case(splits=(1, 2, 4, 1), dp=2),
    Case(schedule="zb-h1", splits=(4, 1, 2, 1)),
    Case("two_stems", "1f1b", CROSSED, splits=(1, 2, 1, 1)),
    # Of its second stage, one layer reads samples and leaves the stage by itself.
    Case("two_stems", "zb-h1", CROSSED, recompute="full"),
    Case("two_stems", "1f1b", ((0, 2), (1, 3, 4)), splits=(2, 1)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_that_form_a_graph_train_like_one_process(worker_pool: WorkerPool, case: Case) -> None:
    require_valid(compile_plan(case.plan, layer_graph(case.config)))
    expected_losses, expected = alone(case)
    seen: set[str] = set()
    for losses, parameters in worker_pool.run(train, case, ranks=case.plan.ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        seen |= set(parameters)
    assert seen == set(expected)


def test_modules_of_one_input_are_refused_where_stages_have_several() -> None:
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    require_plain({1: torch.nn.Linear(2, 2)}, edges)
    with pytest.raises(InputError) as caught:
        require_plain({3: torch.nn.Linear(2, 2)}, edges)
    assert str(caught.value) == "stage 3: has 2 inputs, and its module takes and gives one value"
