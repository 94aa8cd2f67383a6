"""The runtime: losses, evaluation, dropout, records, refusals, and errors that name the instruction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import WorkerPool
from small_jobs import batch_of, loss_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.errors import InputError, RunError
from weft.methods.sharding.kinds import REDUCE
from weft.planning.compile import compile_evaluation_part
from weft.program.kinds import BACKWARD, FORWARD, SEND_ACTIVATION, SEND_GRADIENT, STEP
from weft.program.rank_program import part_of
from weft.run.executor import require_supported
from weft.run.handlers import HANDLERS
from weft.run.record.recorder import Recorder, collect_timeline
from weft.run.runtime import RankRuntime, require_runnable
from weft.run.stage.build import build_stage
from weft.run.state.precision import PRECISIONS

pytestmark = pytest.mark.processes

CONFIG = tiny()


def evaluate(rank: int, ranks: int, plan: Plan) -> tuple[float, float, bool]:
    """Held-out loss before and after a step, with a training step between two evaluations."""
    program = make_program(CONFIG, plan)
    forward_only = compile_evaluation_part(plan, layer_graph(CONFIG), rank)
    runtime = make_runtime(rank, CONFIG, plan, program)
    held_out = [batch_of(CONFIG, plan, step) for step in (100, 101)]
    before = parameters_of(runtime)
    first = runtime.evaluate(forward_only, held_out)
    unchanged = all(torch.equal(value, before[name]) for name, value in parameters_of(runtime).items())
    runtime.step(0, batch_of(CONFIG, plan, 0))
    last = runtime.evaluate(forward_only, held_out)
    assert all(module.training for module in runtime.stages.values())
    runtime.close()
    return first, last, unchanged


@pytest.mark.parametrize(("pp", "dp", "loops"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_evaluation_is_the_mean_loss_and_changes_nothing(
    worker_pool: WorkerPool, pp: int, dp: int, loops: int
) -> None:
    plan = make_plan(CONFIG, pp=pp, dp=dp, loops=loops, schedule="breadth-first", micro_batches=4 // dp)
    model = build_stage(CONFIG, range(8), 7, torch.float64)
    expected = np.mean(
        [
            loss_of(model(inputs), targets).item()
            for step in (100, 101)
            for inputs, targets in map(batch_of(CONFIG, plan, step), range(plan.micro_batches))
        ]
    )
    for first, last, unchanged in worker_pool.run(evaluate, plan, ranks=plan.ranks):
        assert first == pytest.approx(expected, rel=1e-12)
        assert last != first
        assert unchanged


def record(rank: int, ranks: int, plan: Plan, run_dir: Path) -> None:
    program = make_program(CONFIG, plan)
    recorder = Recorder(run_dir, program=part_of(program, rank), plan_id=plan.plan_id, steps=3)
    runtime = make_runtime(rank, CONFIG, plan, program, recorder=recorder)
    for step in range(3):
        runtime.step(step, batch_of(CONFIG, plan, step))
    runtime.close()
    recorder.close()


def test_every_instruction_of_every_step_is_measured(worker_pool: WorkerPool, tmp_path: Path) -> None:
    plan = make_plan(CONFIG, pp=2, dp=2, loops=2, schedule="breadth-first")
    worker_pool.run(record, plan, tmp_path, ranks=4)
    program = make_program(CONFIG, plan)
    timeline = collect_timeline(tmp_path, program, plan.plan_id, "run")
    assert np.array_equal(timeline.position.reshape(3, -1), np.tile(np.arange(len(program)), (3, 1)))
    assert (timeline.posted_ns <= timeline.start_ns).all()
    assert (timeline.start_ns <= timeline.end_ns).all()
    ends, starts = timeline.end_ns.reshape(3, -1), timeline.start_ns.reshape(3, -1)
    edges = program.edges
    kind_of = program.columns.kind
    here = edges.distance == 0
    send = np.isin(kind_of[edges.source], (SEND_ACTIVATION, SEND_GRADIENT))
    compute = here & ~send & np.isin(kind_of[edges.target], (FORWARD, BACKWARD, STEP))
    assert (starts[:, edges.target[compute]] >= ends[:, edges.source[compute]]).all()
    message, posted = here & send, timeline.posted_ns.reshape(3, -1)
    assert (starts[:, edges.target[message]] >= posted[:, edges.source[message]]).all()
    for stage in range(len(plan.stages)):
        together = (kind_of == REDUCE) & (program.columns.stage == stage)
        assert together.sum() == 2
        assert (np.ptp(starts[:, together], axis=1) == 0).all()


class DroppingStage(nn.Module):
    """A stage that drops out a part of what it is given."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.stage(inputs))

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return self.stage.input_shape(micro_batch_size, sequence)

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return self.stage.output_shape(micro_batch_size, sequence)


class ToldStage(DroppingStage):
    """One that tells with which seed it begins to drop out."""

    def __init__(self, seeds: list[int], stage: nn.Module) -> None:
        super().__init__(stage)
        self.seeds = seeds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seeds.append(torch.initial_seed())
        return super().forward(inputs)


def custom_runtime(rank: int, plan: Plan, wrap: Any, loss: Any = loss_of, seed: int = 7) -> RankRuntime:
    program = make_program(CONFIG, plan)
    stages = {
        index: wrap(build_stage(CONFIG, stage.layers, seed, PRECISIONS[plan.precision]))
        for index, stage in enumerate(plan.stages)
        if any(rank in replica.ranks for replica in stage.replicas)
    }
    return RankRuntime(
        plan,
        part_of(program, rank),
        stages,
        loss,
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        device="cpu",
        seed=3,
    )


def drop(rank: int, ranks: int, plan: Plan, noise: int) -> list[float]:
    torch.manual_seed(noise)
    runtime = custom_runtime(rank, plan, DroppingStage)
    losses = [runtime.step(step, batch_of(CONFIG, plan, 0)).loss for step in range(2)]
    runtime.close()
    return losses


def test_dropout_is_keyed_by_what_is_computed(worker_pool: WorkerPool) -> None:
    found = [
        worker_pool.run(drop, make_plan(CONFIG, pp=2, schedule=schedule), noise, ranks=2)[0]
        for noise, schedule in enumerate(("gpipe", "1f1b"))
    ]
    assert found[0] == found[1]


def draw(rank: int, ranks: int, plan: Plan) -> list[int]:
    """The seeds of this rank's forward passes in two steps."""
    seeds: list[int] = []
    runtime = custom_runtime(rank, plan, partial(ToldStage, seeds))
    for step in range(2):
        runtime.step(step, batch_of(CONFIG, plan, 0))
    runtime.close()
    return seeds


def test_every_step_micro_batch_and_stage_draws_numbers_of_its_own(worker_pool: WorkerPool) -> None:
    plan = make_plan(CONFIG, pp=2, schedule="1f1b")
    seeds = [seed for each in worker_pool.run(draw, plan, ranks=2) for seed in each]
    assert len(set(seeds)) == len(seeds) == 2 * plan.micro_batches * 2


def start_unequal(rank: int, ranks: int, plan: Plan) -> dict[str, torch.Tensor]:
    runtime = custom_runtime(rank, plan, lambda stage: stage, seed=rank)
    parameters = parameters_of(runtime)
    runtime.close()
    return parameters


def test_replicas_begin_with_the_values_of_the_first(worker_pool: WorkerPool) -> None:
    first, *others = worker_pool.run(start_unequal, make_plan(CONFIG, dp=3), ranks=3)
    expected = build_stage(CONFIG, range(8), 0, torch.float64).state_dict()
    for name, value in first.items():
        assert torch.equal(value, expected[name])
        assert all(torch.equal(value, other[name]) for other in others)


def broken_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no loss today")


def fail_in_step(rank: int, ranks: int, plan: Plan) -> str:
    runtime = custom_runtime(rank, plan, lambda stage: stage, broken_loss)
    with pytest.raises(RunError) as caught:
        runtime.step(4, batch_of(CONFIG, plan, 0))
    runtime.close()
    return str(caught.value)


def test_an_error_names_rank_step_and_instruction(worker_pool: WorkerPool) -> None:
    [text] = worker_pool.run(fail_in_step, make_plan(CONFIG, pp=1), ranks=1)
    assert text == "rank 0, step 4, instruction F0.0: ZeroDivisionError: no loss today"


def refuse(rank: int, ranks: int, plan: Plan, stages: list[int]) -> str:
    program = make_program(CONFIG, plan)
    modules = {stage: build_stage(CONFIG, plan.stages[stage].layers, 0, torch.float64) for stage in stages}
    with pytest.raises(InputError) as caught:
        RankRuntime(
            plan,
            part_of(program, rank),
            modules,
            loss_of,
            lambda m: torch.optim.SGD(m.parameters()),
            device="cpu",
            seed=0,
        )
    return str(caught.value)


def test_a_job_of_another_size_is_refused(worker_pool: WorkerPool) -> None:
    [text] = worker_pool.run(refuse, make_plan(CONFIG, pp=2), [0], ranks=1)
    assert text == "runtime: the job has 1 rank, the plan uses 2 (nearest valid: 2)"


def test_wrong_stages_are_refused(worker_pool: WorkerPool) -> None:
    [text] = worker_pool.run(refuse, make_plan(CONFIG), [], ranks=1)
    assert text == "runtime: rank 0 was given the stages [], the program gives it [0]"


def test_everything_that_cannot_run_is_listed() -> None:
    plan = make_plan(CONFIG, pp=2)
    program = part_of(make_program(CONFIG, plan), 0)
    require_runnable(plan, program)
    columns = program.columns
    unsupported = replace(
        program,
        columns=replace(columns, iteration=columns.iteration - 1),
    )
    with pytest.raises(InputError) as caught:
        require_runnable(plan.model_copy(update={"precision": "fp16"}), unsupported)
    lines = [str(violation) for violation in caught.value.violations]
    assert len(lines) == 2
    assert lines[0].startswith("plan: precision 'fp16' without the method gradient-norm is not supported")
    assert lines[1] == "program: a prologue is not supported by this runtime yet"
    executed = {name: handler for name, handler in HANDLERS.items() if name != "backward"}
    with pytest.raises(InputError, match="instructions of kind 'backward' are not supported"):
        require_supported(program, executed)
