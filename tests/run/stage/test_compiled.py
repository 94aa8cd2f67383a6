"""Compiled stages: the same numbers, one compilation for equal layers, none after the first run."""

from __future__ import annotations

import pytest
import torch
from equality_table import Row
from methods.rows.tensor_collectives import OVERLAPPED
from pool import WorkerPool
from small_jobs import descent, loss_of
from small_plans import divisible, make_plan, make_program, tiny
from tensor_jobs import DividedLoss, samples_of
from torch import nn
from torch._dynamo.utils import counters

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.program.rank_program import part_of
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage, build_stages
from weft.run.stage.compilable import compile_problems
from weft.run.stage.compiled import compile_stage
from weft.run.stage.layers import layer_functions, run_layers
from weft.run.state.precision import lower_precision
from weft.run.workspace import Batch

CONFIG = tiny(layers=3)
GRAPH = layer_graph(CONFIG)
LAYERS = range(CONFIG.layers + 2)


@pytest.fixture
def compiler() -> None:
    problems = compile_problems(
        make_plan(CONFIG), make_program(CONFIG, make_plan(CONFIG)).columns.kind, GRAPH
    )
    if problems:
        pytest.skip(str(problems[0]))
    torch._dynamo.reset()
    counters.clear()


def trained(stage: nn.Module, recompute: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two micro-batches."""
    tokens = torch.arange(16).reshape(2, 8) % CONFIG.vocabulary
    for inputs in (tokens, tokens.flip(1)):
        output = run_layers(layer_functions(stage, inputs), inputs, recompute=recompute, draws=False)
        loss = loss_of(output, inputs)
        loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in stage.named_parameters()}


@pytest.mark.compiler
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.usefixtures("compiler")
def test_compiled_layers_give_the_gradients_of_the_others(recompute: str) -> None:
    """Of three equal blocks one is compiled; kept and recomputed layers are the same."""
    inputs = torch.zeros(2, CONFIG.sequence, dtype=torch.int64)
    eager = build_stage(CONFIG, LAYERS, 7, torch.float64)
    stage = build_stage(CONFIG, LAYERS, 7, torch.float64)
    names = list(stage.state_dict())
    compile_stage(stage, inputs, dtype=torch.float64, recompute=recompute)
    assert list(stage.state_dict()) == names
    assert all(parameter.grad is None for parameter in stage.parameters())
    loss, gradients = trained(stage, recompute)
    expected_loss, expected = trained(eager, recompute)
    assert loss == pytest.approx(expected_loss, abs=1e-9)
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-9), name
    # The embedding, a block and the head, in training and evaluation; and nothing more for the steps, or
    # for running layers again.
    assert counters["stats"]["unique_graphs"] == 6


@pytest.mark.compiler
@pytest.mark.usefixtures("compiler")
def test_compiled_layers_in_bf16_train_and_are_evaluated_with_gradients_in_fp32() -> None:
    inputs = torch.zeros(2, CONFIG.sequence, dtype=torch.int64)
    stage = build_stage(CONFIG, LAYERS, 7, torch.float32)
    compile_stage(stage, inputs, dtype=torch.bfloat16, recompute="none")
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lower_precision(stage.parameters(), torch.bfloat16)
    loss, gradients = trained(stage, "none")
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    stage.eval()
    tokens = torch.arange(16).reshape(2, 8) % CONFIG.vocabulary
    with torch.no_grad():
        output = run_layers(layer_functions(stage, tokens), tokens, recompute="none", draws=False)
    assert loss_of(output, tokens).item() == pytest.approx(loss, rel=0.2)
    assert counters["stats"]["unique_graphs"] == 6


class Unseen(nn.Module):
    """A layer whose output depends on a value."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum().item() > 0 else inputs + 1


@pytest.mark.usefixtures("compiler")
def test_a_layer_that_cannot_be_compiled_whole_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^train\.compile: a layer of Unseen cannot be compiled: .*false\)$"
    ):
        compile_stage(Unseen(), torch.zeros(2, requires_grad=True), dtype=torch.float32, recompute="none")


def test_a_split_backward_pass_is_refused() -> None:
    plan = make_plan(CONFIG, pp=2, schedule="zb-h1")
    (problem,) = compile_problems(plan, make_program(CONFIG, plan).columns.kind, GRAPH)
    assert str(problem) == (
        "train.compile: schedule 'zb-h1' splits backward passes, and compiled layers cannot be split "
        '(nearest valid: plan.schedule = "1f1b")'
    )


def test_selective_recomputation_is_refused() -> None:
    plan = make_plan(CONFIG)
    stages = tuple(stage.model_copy(update={"recompute": "selective"}) for stage in plan.stages)
    (problem,) = compile_problems(
        plan.model_copy(update={"stages": stages}), make_program(CONFIG, plan).columns.kind, GRAPH
    )
    assert problem.nearest == 'plan.recompute = "full"'


def test_passes_in_segments_are_refused() -> None:
    config, row = divisible("llama"), Row(divisible("llama"), tp=2, methods=(OVERLAPPED,))
    (problem,) = compile_problems(row.plan, make_program(config, row.plan).columns.kind, layer_graph(config))
    assert "passes in segments" in str(problem)


def losses_of_divided_layers(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, compiles: bool
) -> list[float]:
    """The losses of an evaluation and of two steps."""
    torch._dynamo.reset()
    stages = build_stages(plan, config, rank, 7, torch.float64)
    if compiles:
        inputs = torch.zeros(plan.micro_batch_size, config.sequence, dtype=torch.int64)
        compile_stage(stages[0], inputs, dtype=torch.float64, recompute="none")
    part = part_of(make_program(config, plan), rank)
    runtime = RankRuntime(plan, part, stages, DividedLoss(), descent, device="cpu", seed=7)
    evaluation, graphs = compile_evaluation_part(plan, layer_graph(config), rank), counters["stats"].copy()

    def samples(step: int) -> Batch:
        batch = samples_of(config, plan, step)
        return lambda number: tuple(one.contiguous() for one in batch(number))

    losses = [runtime.evaluate(evaluation, [samples(2)])]
    losses += [runtime.step(step, samples(step)).loss for step in range(2)]
    runtime.close()
    assert counters["stats"] == graphs, "no step waits for the compiler"
    return losses


@pytest.mark.compiler
@pytest.mark.processes
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_compiled_parts_of_divided_layers_train_like_the_others(worker_pool: WorkerPool, family: str) -> None:
    row = Row(divisible(family), tp=2, micro_batches=2)
    plain, compiled = (
        worker_pool.run(losses_of_divided_layers, row.model, row.plan, compiles, ranks=2, timeout_s=300.0)
        for compiles in (False, True)
    )
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_layers_with_divided_tokens_are_refused() -> None:
    row = Row(divisible("llama"), cp=2)
    (problem,) = compile_problems(
        row.plan, make_program(row.model, row.plan).columns.kind, layer_graph(row.model)
    )
    assert "layers whose tokens several ranks divide among them (cp) are not compiled" in str(problem)
    assert problem.nearest == "plan.cp = 1"


def test_layers_that_form_a_graph_are_refused() -> None:
    plan, graph = make_plan(CONFIG), layer_graph(resolve_model("own_models:diamond"))
    (problem,) = compile_problems(plan, make_program(CONFIG, plan).columns.kind, graph)
    assert str(problem) == "train.compile: layers that form a graph are not compiled (nearest valid: false)"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    plan = make_plan(CONFIG)
    (problem,) = compile_problems(plan, make_program(CONFIG, plan).columns.kind, GRAPH)
    assert "it needs the C++ compiler no-such-compiler, which is not installed" in str(problem)
