"""Compiled stages: the same numbers, one compilation for equal layers, none after the first run."""

from __future__ import annotations

import pytest
import torch
from small_jobs import loss_of
from small_plans import make_plan, make_program, tiny
from torch import nn
from torch._dynamo.utils import counters

from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.stage.compilable import compile_problems
from weft.run.stage.compiled import compile_stage
from weft.run.stage.layers import layer_functions, run_layers
from weft.run.state.precision import lower_precision

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


@pytest.mark.usefixtures("compiler")
def test_compiled_layers_give_the_gradients_of_the_others() -> None:
    """Of three equal blocks one is compiled; kept and recomputed layers are the same."""
    inputs = torch.zeros(2, CONFIG.sequence, dtype=torch.int64)
    for recompute in ("none", "full"):
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


def test_divided_layers_are_refused() -> None:
    plan = make_plan(CONFIG)
    (stage,) = plan.stages
    wide = tuple(copy.model_copy(update={"ranks": (0, 1)}) for copy in stage.replicas)
    divided = plan.model_copy(update={"stages": (stage.model_copy(update={"replicas": wide}),)})
    (problem,) = compile_problems(divided, make_program(CONFIG, plan).columns.kind, GRAPH)
    assert problem.nearest == "plan.tp = 1"
    (problem,) = compile_problems(
        divided.model_copy(update={"mesh": {"cp": 2}}), make_program(CONFIG, plan).columns.kind, GRAPH
    )
    assert "layers whose tokens several ranks divide among them (cp) are not compiled" in str(problem)
    assert problem.nearest == "plan.cp = 1"
    four = tuple(copy.model_copy(update={"ranks": (0, 1, 2, 3)}) for copy in stage.replicas)
    both = divided.model_copy(
        update={"stages": (stage.model_copy(update={"replicas": four}),), "mesh": {"cp": 2, "tp": 2}}
    )
    found = compile_problems(both, make_program(CONFIG, plan).columns.kind, GRAPH)
    assert [problem.nearest for problem in found] == ["plan.cp = 1", "plan.tp = 1"]


def test_layers_that_form_a_graph_are_refused() -> None:
    plan, graph = make_plan(CONFIG), layer_graph(resolve_model("own_models:diamond"))
    (problem,) = compile_problems(plan, make_program(CONFIG, plan).columns.kind, graph)
    assert str(problem) == "train.compile: layers that form a graph are not compiled (nearest valid: false)"


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    plan = make_plan(CONFIG)
    (problem,) = compile_problems(plan, make_program(CONFIG, plan).columns.kind, GRAPH)
    assert "it needs the C++ compiler no-such-compiler, which is not installed" in str(problem)
