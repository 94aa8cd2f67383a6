"""Law: a rank's tensors take the bytes that are predicted, and one room for weights serves several stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pool import WorkerPool
from predict.cost.machines import cluster
from small_jobs import batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, without_padding

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW, OptimizerWork, counted_work
from weft.describe.plan import Plan
from weft.errors import RunError
from weft.methods.sharding.runtime import gather as whole
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import SHARDINGS, resident_states, stage_parameters, state_bytes
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import held_bytes
from weft.program.program import NONE, Instruction
from weft.run.executor import all_handlers
from weft.run.handlers.base import WEIGHTS, Handler, Issue
from weft.run.runtime import RankRuntime
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

# Name and momentum.
LATER = partial(pytest.param, marks=pytest.mark.tables)
OPTIMIZERS = (
    ("adamw", 0.9),
    LATER("adam", 0.9),
    LATER("sgd", 0.9),
    ("sgd", 0.0),
    LATER("lamb", 0.9),
    ("lans", 0.9),
    ("own_optimizers:SignMomentum", 0.9),
    LATER("own_optimizers:momentum_sgd", 0.9),
)


def looped(sharding: str, precision: str = "fp32", optimizer: OptimizerWork = ADAMW) -> Plan:
    """Two replicas with four stages each, on two buffers where they share out enough."""
    plan = make_plan(without_padding(), dp=2, loops=4, schedule="breadth-first", precision=precision)
    return plan.model_copy(update={"sharding": sharding, "optimizer": optimizer})


def tensors_of(runtime: RankRuntime) -> Iterator[torch.Tensor]:
    """Weights, gradients, masters and states of the optimizer; scalars are no part of any prediction."""
    for stage, module in runtime.stages.items():
        yield from (parameter.detach() for parameter in module.parameters())
        yield runtime.buckets[stage].flat
        if stage in runtime.shards:
            yield runtime.shards[stage].weights.own
            yield runtime.shards[stage].own_gradient
        if stage in runtime.stepped:
            yield from (piece.stepped.detach() for piece in runtime.stepped[stage].pieces)
        for states in runtime.optimizers[stage].state.values():
            yield from (state for state in states.values() if state.ndim)


def held(
    rank: int, ranks: int, config: ModelConfig, plans: list[Plan], name: str = "adamw", momentum: float = 0.9
) -> list[int]:
    """Bytes of a rank's distinct tensors after a step of every plan."""
    found = []
    settings = OptimizerSettings(name=name, learning_rate=0.01, weight_decay=0.2, momentum=momentum)
    for generation, plan in enumerate(plans):
        runtime = make_runtime(
            rank,
            config,
            plan,
            make_program(config, plan),
            optimizer_factory=optimizer_factory(settings),
            generation=generation,
        )
        runtime.step(0, batch_of(config, plan, 0))
        storages = [tensor.untyped_storage() for tensor in tensors_of(runtime)]
        found.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        runtime.close()
    return found


def predicted(config: ModelConfig, plan: Plan) -> int:
    """What every rank of two replicas holds in states and buffers; all hold as much."""
    [held] = {*predicted_by_rank(config, plan)}
    return held


def predicted_by_rank(config: ModelConfig, plan: Plan) -> list[int]:
    """What each rank holds in states and buffers, without the room for what a reduction brings."""
    graph, shape = layer_graph(config), Shape(plan.micro_batch_size, plan.sequence, 1)
    states = state_bytes(plan.precision, plan.optimizer)
    stages = [
        (
            np.array([one.ranks[0] for one in stage.replicas]),
            stage_parameters(graph, stage.layers, shape),
            len(stage.replicas),
        )
        for stage in plan.stages
    ]
    resident = resident_states(stages, plan.ranks, states, plan.sharding)
    held: list[int] = (resident.total - resident.arriving_gradients).tolist()
    return held


def test_states_take_the_predicted_bytes_on_every_level(worker_pool: WorkerPool) -> None:
    config = without_padding()
    plans = [looped(level, precision) for precision in ("fp32", "bf16") for level in SHARDINGS]
    expected = [predicted(config, plan) for plan in plans]
    assert worker_pool.run(held, config, plans, ranks=2) == [expected] * 2


def test_shards_of_tied_copies_take_the_predicted_bytes(worker_pool: WorkerPool) -> None:
    config = replace(without_padding(), tied_embeddings=True)
    plans = []
    for loops, precision, level in product((1, 2), ("fp32", "bf16"), SHARDINGS[1:]):
        plan = make_plan(config, pp=2, dp=2, loops=loops, schedule="breadth-first", precision=precision)
        plans.append(plan.model_copy(update={"sharding": level}))
    expected = [predicted_by_rank(config, plan) for plan in plans]
    found = worker_pool.run(held, config, plans, ranks=4)
    assert [list(one) for one in zip(*found, strict=True)] == expected


@pytest.mark.parametrize(("name", "momentum"), OPTIMIZERS)
def test_states_of_every_optimizer_take_the_predicted_bytes(
    worker_pool: WorkerPool, name: str, momentum: float
) -> None:
    config, work = without_padding(), counted_work(name, momentum=momentum).work
    levels = [(level, precision) for precision in ("fp32", "bf16", "fp64") for level in ("zero-0", "zero-1")]
    plans = [looped(level, precision, work) for level, precision in levels]
    expected = [predicted(config, plan) for plan in plans]
    assert worker_pool.run(held, config, plans, name, momentum, ranks=2) == [expected] * 2


@pytest.mark.parametrize("level", ["zero-0", "zero-1"])
def test_muon_keeps_one_state_of_matrices_and_two_of_others(worker_pool: WorkerPool, level: str) -> None:
    config = without_padding()
    graph, work = layer_graph(config), counted_work("muon").work
    plans = [looped(level, precision, work) for precision in ("fp32", "bf16", "fp64")]
    [found, again] = worker_pool.run(held, config, plans, "muon", 0.95, ranks=2)
    for place, plan in enumerate(plans):
        program, model = compile_plan(plan, graph), CostModel(graph=graph, cluster=cluster(1, 2))
        placed = PlacedPlan(program=program, plan=plan, model=model)
        pricing = Pricing(program=program, placed=placed)
        more = held_bytes(pricing)["further optimizer states"].value
        both = 2 * predicted(config, plan) + int(more.sum())
        # Of a share, a rank counts as many others as it may hold.
        measured = found[place] + again[place]
        assert measured == both if level == "zero-0" else measured <= both


def unfilled(workspace: Workspace, instruction: Instruction) -> Issue:
    """A gather that takes the room and leaves in it what is there, unless it is a stage's first in a step."""
    weights = workspace.resources.shards[instruction.stage].weights
    if instruction.part == 0:
        return whole(workspace, instruction)

    def issue(stream: Stream) -> Completion:
        claimed = stream.run(str(instruction), weights.claim, weights.room)
        workspace.values[WEIGHTS, instruction.stage, NONE] = Value.of(None, claimed)
        return claimed

    return issue


def left_out(workspace: Workspace, instruction: Instruction) -> Issue:
    if instruction.part == 0:
        return whole(workspace, instruction)
    return lambda stream: stream.run(str(instruction), _nothing)


def _nothing() -> None:
    """In place of a gather."""


def train(rank: int, ranks: int, config: ModelConfig, plan: Plan, gather: Handler) -> dict[str, torch.Tensor]:
    """Parameters after two steps; they are read in between, too, which must not change them."""
    executed = {**all_handlers(), "gather": gather}
    with patch("weft.run.executor.all_handlers", lambda: executed):
        runtime = make_runtime(rank, config, plan, make_program(config, plan))
    for step in range(2):
        runtime.step(step, batch_of(config, plan, step))
        runtime.gather_weights()
        parameters = parameters_of(runtime)
    runtime.close()
    return parameters


def fail(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    with pytest.raises(RunError) as caught:
        train(rank, ranks, config, plan, left_out)
    return str(caught.value)


def test_backward_passes_need_their_weights_back_in_the_buffer(worker_pool: WorkerPool) -> None:
    """Autograd does not notice that weights change under it, so what the Program gathers must be right."""
    config = without_padding()
    expected, found, wrong = (
        worker_pool.run(train, config, plan, gather, ranks=2)[0]
        for plan, gather in (
            (looped("zero-0"), whole),
            (looped("zero-3"), whole),
            (looped("zero-3"), unfilled),
        )
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not all(torch.equal(wrong[name], value) for name, value in expected.items())


def test_weights_that_are_not_gathered_are_not_read(worker_pool: WorkerPool) -> None:
    for text in worker_pool.run(fail, without_padding(), looped("zero-3"), ranks=2):
        assert "weights are read between a gather and its free" in text
