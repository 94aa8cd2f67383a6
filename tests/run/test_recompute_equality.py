"""Law: stages that recompute train to the same bits as stages that keep, under every order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pool import WorkerPool
from run.test_equality import require_equal
from small_jobs import (
    SEED,
    batch_of,
    descent,
    loss_of,
    make_plan,
    make_program,
    parameters_of,
    tiny,
)
from torch import nn

from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout, PartialLayout
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan, Recompute
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.weft import WeftPlanner
from weft.planning.problem import problem_of_model
from weft.program.rank_program import part_of
from weft.run.precision import PRECISIONS
from weft.run.runtime import RankRuntime
from weft.run.stages import build_stage

pytestmark = pytest.mark.processes

STEPS = 2


def recomputing(plan: Plan, stages: Sequence[int] | None = None, how: Recompute = "full") -> Plan:
    chosen = range(len(plan.stages)) if stages is None else stages
    return plan.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"recompute": how}) if index in chosen else stage
                for index, stage in enumerate(plan.stages)
            )
        }
    )


def train_with_dropout(
    rank: int, ranks: int, config: ModelConfig, plans: list[Plan], rate: float
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and parameters of this rank under each of the plans."""
    results = []
    for generation, plan in enumerate(plans):
        stages = {
            index: build_stage(config, stage.layers, SEED, PRECISIONS[plan.precision])
            for index, stage in enumerate(plan.stages)
            if any(rank in replica.ranks for replica in stage.replicas)
        }
        for part in (part for module in stages.values() for part in module.modules()):
            if isinstance(part, nn.Dropout):
                part.p = rate
        runtime = RankRuntime(
            plan,
            part_of(make_program(config, plan), rank),
            stages,
            loss_of,
            descent,
            device="cpu",
            seed=SEED,
            generation=generation,
        )
        losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
        results.append((losses, parameters_of(runtime)))
        runtime.close()
    return results


def count_losses(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> int:
    calls = []

    def counted_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(logits.requires_grad)
        return loss_of(logits, targets)

    stage = build_stage(config, plan.stages[0].layers, SEED, PRECISIONS[plan.precision])
    program = make_program(config, plan)
    runtime = RankRuntime(
        plan, part_of(program, rank), {0: stage}, counted_loss, descent, device="cpu", seed=SEED
    )
    runtime.step(0, batch_of(config, plan, 0))
    runtime.close()
    assert all(calls)
    return len(calls)


def test_the_loss_belongs_to_the_last_layer(worker_pool: WorkerPool) -> None:
    config = tiny()
    kept = make_plan(config, schedule="1f1b", micro_batches=3)
    counts = [worker_pool.run(count_losses, config, plan, ranks=1) for plan in (kept, recomputing(kept))]
    assert counts == [[3], [6]]


def require_same_bits(pool: WorkerPool, config: ModelConfig, plans: list[Plan], rate: float) -> None:
    """All plans, on the same ranks, end with the same bits."""
    for (expected_losses, expected), *others in pool.run(
        train_with_dropout, config, plans, rate, ranks=plans[0].ranks
    ):
        for losses, found in others:
            assert losses == expected_losses
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "loops", "rate"),
    [
        ("gpipe", 2, 1, 1, 0.3),
        ("1f1b", 2, 2, 1, 0.3),
        ("breadth-first", 2, 1, 2, 0.3),
        ("depth-first", 2, 1, 2, 0.3),
        ("zb-h1", 2, 1, 1, 0.3),
        ("zb-v", 2, 1, 2, 0.3),
        ("chimera", 2, 1, 1, 0.3),
    ],
)
def test_every_order_of_gpt_has_the_bits_of_kept_activations(
    worker_pool: WorkerPool, schedule: str, pp: int, dp: int, loops: int, rate: float
) -> None:
    config = tiny()
    kept = make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule, precision="fp32")
    require_same_bits(worker_pool, config, [kept, recomputing(kept)], rate)


@pytest.mark.parametrize(
    ("family", "schedule", "loops", "rate"),
    [
        ("llama", "1f1b", 1, 0.0),
        ("llama", "zb-v", 2, 0.0),
        ("gpt", "zb-h1", 1, 0.3),
        ("bert", "1f1b", 1, 0.3),
    ],
)
def test_every_way_of_recomputing_has_the_bits_of_kept_activations(
    worker_pool: WorkerPool, family: str, schedule: str, loops: int, rate: float
) -> None:
    config = tiny(family)
    kept = make_plan(config, pp=2, loops=loops, schedule=schedule, precision="fp32")
    plans = [kept, recomputing(kept), recomputing(kept, how="selective")]
    require_same_bits(worker_pool, config, plans, rate)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_stage_follows_its_own_choice(worker_pool: WorkerPool, schedule: str) -> None:
    config = tiny()
    kept = make_plan(config, pp=2, schedule=schedule, precision="fp32")
    uneven = kept.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(update={"layers": tuple(layers)})
                for stage, layers in zip(kept.stages, (range(3), range(3, 8)), strict=True)
            )
        }
    )
    plans = [uneven, recomputing(uneven, [0]), recomputing(uneven, [1])]
    require_same_bits(worker_pool, config, plans, 0.3)


@pytest.mark.parametrize(("schedule", "pp", "dp"), [("1f1b", 4, 1), ("zb-h1", 2, 2)])
def test_recomputing_plans_train_like_one_process(
    worker_pool: WorkerPool, schedule: str, pp: int, dp: int
) -> None:
    config = tiny("llama")
    plan = recomputing(make_plan(config, pp=pp, dp=dp, schedule=schedule))
    require_equal(worker_pool, config, plan, bitwise=False)


def planned_unlike(config: ModelConfig, *, pp: int, dp: int) -> Plan:
    """What the planner finds on devices with three quarters of the memory to recompute nothing."""
    pins = PartialLayout(
        pp=pp,
        dp=dp,
        tp=1,
        micro_batch_size=2,
        schedule="1f1b",
        sharding="zero-0",
    )
    cluster = parse_cluster(f"{pp * dp}xv100-16gb")
    problem = problem_of_model(config, cluster, global_batch=8 * dp, precision="fp64", pins=pins)
    layout = Layout(pp=pp, dp=dp, loops=1, micro_batch_size=2, schedule="1f1b")
    [group] = cluster.groups
    taken = group.device.memory_bytes - group.device.usable_bytes
    memory = round(0.75 * Bounds(problem).holding(layout).total) + taken
    tight = replace(cluster, groups=(replace(group, device=replace(group.device, memory_bytes=memory)),))
    problem = replace(problem, job=replace(problem.job, cluster=tight))
    plan = WeftPlanner().search(problem).fitting[0].plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(("pp", "dp"), [(4, 1), (2, 2)])
def test_plans_whose_stages_the_planner_lets_differ_train_like_one_process(
    worker_pool: WorkerPool, pp: int, dp: int
) -> None:
    config = tiny("llama", layers=8)
    plan = planned_unlike(config, pp=pp, dp=dp)
    assert [stage.recompute for stage in plan.stages] == ["full", "selective", "none", "none"][:pp]
    require_equal(worker_pool, config, plan, bitwise=False)
