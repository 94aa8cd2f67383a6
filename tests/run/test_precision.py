"""Law: a run in bf16 steps fp32 masters, to the bits of one process, however states are shared out."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from pool import WorkerPool
from small_jobs import SEED, batch_of, loss_of, make_plan, make_program, make_runtime, tiny
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.program.kinds import MESSAGES
from weft.program.rank_program import part_of
from weft.run.channels import Outbox
from weft.run.precision import PRECISIONS, STEPPED, at_least_fp32, give, lower_precision
from weft.run.runtime import require_runnable
from weft.run.stages import build_stage
from weft.run.streams import Completion, Stream, Value
from weft.training.optimizers import OptimizerSettings, optimizer_factory
from weft.training.weight_tensors import model_tensors

STEPS = 3
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.01, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
LEVELS = ("zero-0", "zero-1", "zero-2", "zero-3")
Masters = dict[str, torch.Tensor]
Outcome = tuple[list[float], Masters]


def replay(config: ModelConfig, plan: Plan) -> Outcome:
    """One process: a bf16 model, gradients added up in fp32, and an fp32 model that is stepped and rounded.

    Replicas add up what they have first, as their sum is in the order of the ranks.
    """
    masters = build_stage(config, range(config.layers + 2), SEED, torch.float32)
    model = build_stage(config, range(config.layers + 2), SEED, torch.float32)
    lower_precision(model.parameters(), torch.bfloat16)
    optimizer = optimizer_factory(ADAMW)(masters)
    share = plan.stages[0].replicas[0].micro_batches
    losses = []
    for step in range(STEPS):
        batch, total = batch_of(config, plan, step), 0.0
        sums = [torch.zeros_like(master) for master in masters.parameters()]
        for first in range(0, plan.micro_batches, share):
            own = [torch.zeros_like(master) for master in masters.parameters()]
            for number in range(first, first + share):
                inputs, targets = batch(number)
                loss = loss_of(model(inputs).float(), targets) * (1.0 / plan.micro_batches)
                loss.backward()
                total += loss.item()
                for addend, parameter in zip(own, model.parameters(), strict=True):
                    assert parameter.grad is not None
                    addend += parameter.grad.float()
                    parameter.grad = None
            for sum_, addend in zip(sums, own, strict=True):
                sum_ += addend
        for master, gradient in zip(masters.parameters(), sums, strict=True):
            master.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in masters.named_parameters()}


def alone(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> Outcome:
    return replay(config, plan)


def train(rank: int, ranks: int, config: ModelConfig, plans: list[Plan]) -> list[Outcome]:
    """Losses and masters of every plan, one after the other."""
    outcomes = []
    for generation, plan in enumerate(plans):
        runtime = make_runtime(
            rank,
            config,
            plan,
            make_program(config, plan),
            optimizer_factory=optimizer_factory(ADAMW),
            generation=generation,
        )
        losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
        masters = model_tensors(runtime.stages, runtime.stepped)
        # Published: parameters are the masters, rounded.
        runtime.gather_weights()
        for module in runtime.stages.values():
            for name, parameter in module.named_parameters():
                assert parameter.dtype == torch.bfloat16
                assert name not in masters or torch.equal(parameter, masters[name].bfloat16())
        outcomes.append((losses, {name: value.clone() for name, value in masters.items()}))
        runtime.close()
    return outcomes


def levels(plan: Plan) -> list[Plan]:
    chosen = LEVELS if len(plan.stages[0].replicas) > 1 else LEVELS[:1]
    return [plan.model_copy(update={"sharding": level}) for level in chosen]


def recomputed(plan: Plan) -> Plan:
    stages = tuple(stage.model_copy(update={"recompute": "full"}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "schedule", "pp", "dp", "loops", "change"),
    [
        ("gpt", "gpipe", 1, 1, 1, None),
        ("gpt", "breadth-first", 1, 2, 4, recomputed),
        ("llama", "1f1b", 2, 2, 1, None),
        ("gpt", "zb-v", 2, 2, 2, None),
    ],
)
def test_masters_are_those_of_one_process(
    worker_pool: WorkerPool,
    family: str,
    schedule: str,
    pp: int,
    dp: int,
    loops: int,
    change: Callable[[Plan], Plan] | None,
) -> None:
    config = tiny(family)
    plan = make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule, micro_batches=4, precision="bf16")
    plans = levels(plan if change is None else change(plan))
    [(expected_losses, expected)] = worker_pool.run(alone, config, plan, ranks=1)
    answers = worker_pool.run(train, config, plans, ranks=plan.ranks)
    for outcomes in zip(*answers, strict=True):
        assert [losses for losses, _ in outcomes] == [pytest.approx(expected_losses, rel=1e-12)] * plan.ranks
        masters = {name: value for _, found in outcomes for name, value in found.items()}
        assert set(masters) == set(expected)
        for name, value in masters.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, expected[name]), name


@pytest.mark.processes
def test_copies_of_a_tied_weight_have_equal_masters(worker_pool: WorkerPool) -> None:
    config = tiny(tied=True)
    plans = levels(make_plan(config, pp=2, dp=2, schedule="1f1b", micro_batches=4, precision="bf16"))
    first, *others = zip(*worker_pool.run(train, config, plans, ranks=4), strict=True)
    table = "transformer.wte.weight"
    copies = [found[table] for outcomes in (first, *others) for _, found in outcomes if table in found]
    assert len(copies) >= len(plans) * 2
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert [losses for losses, _ in first] == [losses for losses, _ in others[-1]]


def watch(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[int], list[int], float, list[float]]:
    """Bytes sent and announced, the loss of an evaluation, and those of steps on one batch."""
    program = make_program(config, plan)
    mine = program.columns.rank == rank
    sends = [kind for kind, _ in MESSAGES]
    announced = [
        int(size)
        for kind, size in zip(program.columns.kind[mine], program.columns.bytes[mine], strict=True)
        if kind in sends
    ]
    sent: list[int] = []
    send = Outbox.send

    def counted(outbox: Outbox, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        sent.append(value.content.nbytes)
        return send(outbox, stream, label, value)

    batch = batch_of(config, plan, 0)
    runtime = make_runtime(rank, config, plan, program, optimizer_factory=optimizer_factory(ADAMW))
    with patch.object(Outbox, "send", counted):
        losses = [runtime.step(0, batch).loss]
    losses += [runtime.step(step, batch).loss for step in range(1, 25)]
    evaluated = runtime.evaluate(compile_evaluation_part(plan, layer_graph(config), rank), [batch])
    runtime.close()
    return sorted(sent), sorted(announced), evaluated, losses


@pytest.mark.processes
def test_messages_have_the_predicted_bytes_and_the_loss_falls(worker_pool: WorkerPool) -> None:
    config = tiny()
    plan = make_plan(config, pp=2, dp=2, loops=2, schedule="breadth-first", precision="bf16")
    plan = plan.model_copy(update={"sharding": "zero-3"})
    for sent, announced, evaluated, losses in worker_pool.run(watch, config, plan, ranks=4):
        assert sent == announced
        assert set(sent) == {2 * plan.micro_batch_size * config.sequence * config.hidden}
        assert losses[-1] < 0.8 * losses[0]
        assert evaluated < losses[-2]


def test_16_bits_without_the_range_of_fp32_are_refused() -> None:
    plan = make_plan(tiny(), precision="fp16")
    with pytest.raises(InputError) as caught:
        require_runnable(plan, part_of(make_program(tiny(), plan), 0))
    assert str(caught.value) == (
        "plan: precision 'fp16', of which losses must be scaled, is not supported by this runtime yet "
        "(nearest valid: bf16)"
    )


def test_a_cast_parameter_keeps_its_gradient_and_adds_to_it_in_place() -> None:
    layer = nn.Linear(3, 2)
    flat = torch.zeros(6)
    layer.weight.grad = flat.view(2, 3)
    lower_precision(layer.parameters(), torch.bfloat16)
    for _ in range(2):
        layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() == flat.data_ptr()
    assert (flat == 2).all()
    # Again, with another tensor of the same precision: what it adds to stays.
    give(layer.weight, torch.zeros(2, 3, dtype=torch.bfloat16))
    layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert (flat == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_computed_in_fp32_or_wider(dtype: torch.dtype) -> None:
    wide = at_least_fp32(torch.ones(2, dtype=dtype))
    assert wide.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert at_least_fp32(torch.ones(2, dtype=torch.uint8)).dtype == torch.uint8


def test_only_bf16_steps_another_precision_than_it_computes_with() -> None:
    assert [name for name in PRECISIONS if STEPPED[name] != PRECISIONS[name]] == ["bf16"]
