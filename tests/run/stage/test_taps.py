"""Laws: a tap sees each gradient once, before it is added up, and each layer once, whoever runs it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import convolutional_jobs as images
import pytest
import small_jobs as tokens
import small_plans as plans
import torch
from pool import WorkerPool
from tensor_jobs import whole_loss
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.program.rank_program import part_of
from weft.run.methods import MethodState, StepGate
from weft.run.resources import Resources
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage, build_stages
from weft.run.stage.taps import Passing, StageTaps, Tap, stage_taps
from weft.run.state.precision import STEPPED
from weft.run.streams import Value
from weft.run.workspace import Workspace

pytestmark = pytest.mark.processes

STEP = 3
Seen = dict[tuple[int, Any], list[torch.Tensor]]


class Watch(MethodState):
    """Keeps a copy of all that taps show, and of what a stage's optimizer is about to step."""

    def __init__(self) -> None:
        self.passes: set[int] = set()
        self.ended: list[tuple[int, int]] = []
        self.gradients: Seen = defaultdict(list)
        self.inputs: Seen = defaultdict(list)
        self.outputs: Seen = defaultdict(list)
        self.summed: dict[str, torch.Tensor] = {}
        self._stages: Any = {}

    def begin(self, resources: Resources) -> None:
        self._stages = resources.stages

    def taps(self, stage: int) -> Sequence[Tap]:
        def note(seen: Seen, now: Passing, what: str | int, tensor: torch.Tensor) -> None:
            assert now.stage == stage
            assert not torch.is_grad_enabled()
            self.passes.add(now.step)
            # A product, which a layer that keeps its products must not take for one of its own.
            tensor.flatten(0, -2).float().T @ tensor.flatten(0, -2).float() if tensor.ndim > 1 else None
            seen[now.micro_batch, what].append(tensor.detach().clone())

        return (
            Tap(
                gradient=lambda *one: note(self.gradients, *one),
                layer_input=lambda *one: note(self.inputs, *one),
                output_gradient=lambda *one: note(self.outputs, *one),
                ended=lambda now: self.ended.append((now.stage, now.micro_batch)),
            ),
        )

    def gate(self, workspace: Workspace, stage: int) -> StepGate:
        return _Keeping(self.summed, self._stages[stage])


class _Keeping:
    def __init__(self, summed: dict[str, torch.Tensor], module: nn.Module) -> None:
        self._summed, self._module = summed, module

    def reads(self) -> tuple[Value, ...]:
        return ()

    def votes(self, *values: Value) -> None:
        named = self._module.named_parameters()
        self._summed |= {name: one.grad.clone() for name, one in named if one.grad is not None}

    def stepped(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    schedule: str = "1f1b"
    pp: int = 2
    recompute: str = "none"
    family: str = "gpt"
    precision: str = "fp64"
    frozen: str = "nothing"
    tied: bool = False

    @property
    def config(self) -> ModelConfig:
        return images.tiny("resnet") if self.family == "resnet" else plans.tiny(layers=4, tied=self.tied)

    @property
    def plan(self) -> Plan:
        plan = plans.make_plan(
            self.config, pp=self.pp, schedule=self.schedule, micro_batches=3, precision=self.precision
        )
        stages = tuple(stage.model_copy(update={"recompute": self.recompute}) for stage in plan.stages)
        return plan.model_copy(update={"stages": stages})

    def freeze(self, module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.frozen not in name)
        return module


def watch(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    plan, config, state = case.plan, case.config, Watch()
    stages = build_stages(plan, config, rank, tokens.SEED, STEPPED[plan.precision])
    batch = images.images_of if case.family == "resnet" else tokens.batch_of
    with patch("weft.run.resources.states_of", lambda making, settings: {"watch": state}):
        runtime = RankRuntime(
            plan,
            part_of(plans.make_program(config, plan), rank),
            {stage: case.freeze(module) for stage, module in stages.items()},
            whole_loss,
            tokens.descent,
            device="cpu",
            seed=tokens.SEED,
        )
    runtime.step(STEP, batch(config, plan, STEP))
    modules = dict(runtime.stages)
    runtime.close()
    assert not any(one._backward_hooks for module in modules.values() for one in module.parameters())
    # Plain parts: the process that asks knows no class of this file by the name that it has here.
    return {"passes": state.passes, "ended": state.ended, "summed": state.summed} | {
        name: dict(getattr(state, name)) for name in ("gradients", "inputs", "outputs")
    }


def alone(case: Case) -> tuple[Seen, Seen, Seen]:
    """Gradients, inputs of layers and gradients of their outputs, of one process that keeps all of them."""
    plan, config = case.plan, case.config
    [model] = build_stages(
        plans.make_plan(config, micro_batches=3), config, 0, tokens.SEED, torch.float64
    ).values()
    case.freeze(model)
    gradients, inputs, outputs = {}, {}, {}
    batch = (images.images_of if case.family == "resnet" else tokens.batch_of)(config, plan, STEP)
    for number in range(3):
        value, targets = batch(number)
        value = value.double() if value.is_floating_point() else value
        made = []
        for layer, function in enumerate(model.layer_functions(value)):
            inputs[number, layer] = [value.detach()]
            value = function(value)
            made.append(value)
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        wanted = [one for one in made if one.requires_grad]
        loss = whole_loss(value, targets) / 3
        found = torch.autograd.grad(loss, [*trained.values(), *wanted])
        gradients |= {(number, name): [one] for name, one in zip(trained, found, strict=False)}
        first = len(made) - len(wanted)
        outputs |= {(number, first + k): [one] for k, one in enumerate(found[len(trained) :])}
    return gradients, inputs, outputs


CASES = (
    Case(pp=1, tied=True, recompute="selective"),
    Case(recompute="full"),
    Case("zb-h1", recompute="selective"),
    Case("zb-h1", recompute="full", frozen="ln_"),
    Case("zb-h1", family="resnet", recompute="full"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_taps_see_what_one_process_keeps(worker_pool: WorkerPool, case: Case) -> None:
    expected = alone(case)
    watches = worker_pool.run(watch, case, ranks=case.pp)
    assert all(one["passes"] == {STEP} for one in watches)
    ended = [(rank, number) for rank in range(case.pp) for number in range(3)]
    assert [pair for one in watches for pair in sorted(one["ended"])] == ended
    for kind, wanted in zip(("gradients", "inputs", "outputs"), expected, strict=True):
        found = {key: seen for one in watches for key, seen in one[kind].items()}
        assert found.keys() == wanted.keys()
        for key, seen in found.items():
            assert len(seen) == 1, (kind, key)
            torch.testing.assert_close(seen[0], wanted[key][0], rtol=1e-9, atol=1e-12)
    require_sums(watches)


def require_sums(watches: Sequence[dict[str, Any]]) -> None:
    """What is seen adds up, bit by bit, to what is stepped."""
    for one in watches:
        totals = {name: torch.zeros_like(value) for name, value in one["summed"].items()}
        for (_, name), [seen] in one["gradients"].items():
            totals[name] += seen
        assert totals.keys() == one["summed"].keys()
        assert all(torch.equal(totals[name], value) for name, value in one["summed"].items())


def test_what_is_seen_adds_up_in_16_bits(worker_pool: WorkerPool) -> None:
    require_sums(worker_pool.run(watch, Case("zb-h1", precision="bf16"), ranks=2))


def test_what_a_tap_is_shown_is_no_copy() -> None:
    module, shown = nn.Linear(3, 2), []
    taps = StageTaps(module, 0, 0, [Tap(gradient=lambda now, name, tensor: shown.append(tensor.data_ptr()))])
    made = []

    def differentiate(output: torch.Tensor, *, step: int) -> None:
        # Without a gradient that is there already, autograd keeps the tensor that it has made.
        output.backward()
        made.extend(one.grad.data_ptr() for one in module.parameters())

    taps.around(0, differentiate, ends=True)(module(torch.ones(4, 3)).sum(), step=0)
    assert set(shown) & set(made)
    taps.close()


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_modules_of_a_layer_that_runs_again_are_seen_once(recompute: str) -> None:
    inner, outer = nn.Linear(4, 3), nn.Linear(3, 4)
    module = nn.Sequential(nn.Sequential(inner, nn.Tanh(), outer)).double()
    inputs, gradients = defaultdict(list), defaultdict(list)
    tap = Tap(
        modules=("0.0", "0.2"),
        module_input=lambda now, name, tensor: inputs[name].append((now, tensor)),
        module_gradient=lambda now, name, tensor: gradients[name].append((now, tensor)),
    )
    taps = StageTaps(module, 0, 0, (tap,))
    value = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    now = taps.passing(5, 1)
    output = taps.run_layers(taps.watched((module[0],), now), value, now, recompute=recompute, draws=False)
    output.square().sum().backward()
    hidden = torch.tanh(inner(value))
    output_gradient = 2.0 * outer(hidden)
    for seen, expected in (
        (inputs["0.0"], value),
        (inputs["0.2"], hidden),
        (gradients["0.2"], output_gradient),
        (gradients["0.0"], output_gradient @ outer.weight * (1.0 - hidden.square())),
    ):
        [(passing, tensor)] = seen
        assert passing == now
        assert torch.allclose(tensor, expected)
    taps.close()
    module(value).sum().backward()
    assert len(inputs["0.0"]) == len(gradients["0.0"]) == 1


def test_a_passing_ends_once_after_all_its_gradients() -> None:
    module, told = nn.Linear(3, 2), []
    see = Tap(gradient=lambda now, name, gradient: told.append(name), ended=lambda now: told.append("ended"))
    taps = StageTaps(module, 0, 0, [see])

    def differentiate(output: torch.Tensor, *, step: int) -> None:
        output.backward()

    for ends in (False, True):
        taps.around(0, differentiate, ends=ends)(module(torch.ones(4, 3)).sum(), step=0)
    taps.close()
    assert sorted(told[:-1]) == ["bias", "bias", "weight", "weight"]
    assert told[-1] == "ended"


def test_a_stage_without_taps_has_no_hook(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(hooks_without_taps, Case(), ranks=2) == [(0, 0)] * 2


def hooks_without_taps(rank: int, ranks: int, case: Case) -> tuple[int, int]:
    runtime = tokens.make_runtime(rank, case.config, case.plan, plans.make_program(case.config, case.plan))
    hooked = sum(bool(one._backward_hooks) for one in runtime.stages[rank].parameters())
    found = hooked, len(runtime._resources.taps)
    runtime.close()
    return found


def test_layers_that_form_a_graph_cannot_be_seen() -> None:
    stage = build_stage(resolve_model("own_models:diamond"), range(6), 0, torch.float64)
    assert stage_taps({0: stage}, {0: 0}, lambda stage: [Tap(gradient=print)])[0].sees_layers is False
    with pytest.raises(InputError, match="stage 0: taps see inputs and outputs of layers in chains only"):
        stage_taps({0: stage}, {0: 0}, lambda stage: [Tap(layer_input=print)])
