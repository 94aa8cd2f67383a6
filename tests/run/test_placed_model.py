"""A model on several devices of one process computes what it computes on one."""

from __future__ import annotations

import pytest
import torch
from own_models import diamond, two_stems
from small_plans import make_plan
from torch import nn

from weft.capture.block_model import BlockModel
from weft.capture.graphs.captured import CapturedModel
from weft.describe.models import resolve_model
from weft.describe.plan import Plan, Replica, Stage
from weft.errors import InputError, RunError
from weft.run.placed_model import PlacedDevice, PlacedModel
from weft.run.stage.families.own import OwnStage

CPU = torch.device("cpu")


def plan_of(name: str, places: tuple[int, ...], **more: int) -> Plan:
    config = resolve_model(f"own_models:{name}")
    return make_plan(config, pp=max(places) + 1, places=places, schedule="placed", precision="fp32", **more)


def on_one(model: BlockModel, inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and the gradients of all layers in their order, on one device."""
    graph = model.layer_graph()
    layers = [*OwnStage(model, range(len(graph.layers)), 1, torch.float32).layers.values()]
    made: list[torch.Tensor] = []
    for index, layer in enumerate(layers):
        read = [inputs for _ in graph.inputs_read[index]]
        made.append(layer(*read, *(made[one] for one in sorted(graph.feeders[index]))))
    made[-1].square().sum().backward()
    return made[-1], [one.grad for layer in layers for one in layer.parameters() if one.grad is not None]


@pytest.mark.parametrize(("name", "places"), [("diamond", (0, 1, 0, 1)), ("two_stems", (0, 1, 2, 1))])
def test_outputs_and_gradients_have_the_bits_of_one_device(name: str, places: tuple[int, ...]) -> None:
    model = {"diamond": diamond, "two_stems": two_stems}[name]()
    inputs = torch.randn(4, 1, 8, 8)
    expected, gradients = on_one(model, inputs)
    placed = PlacedModel(model, plan_of(name, places), ["cpu"] * (max(places) + 1), seed=1)
    output = placed(inputs)
    output.square().sum().backward()
    assert torch.equal(output, expected)
    found = [one.grad for one in placed.parameters() if one.grad is not None]
    assert len(found) == len(gradients) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True))


def test_kept_activations_are_counted_and_let_go_by_the_backward_pass() -> None:
    placed = PlacedModel(diamond(), plan_of("diamond", (0, 1, 0, 1)), ["cpu", "cpu"])
    resident, peaks = placed.peak_bytes, []
    for samples in (2, 2, 4):
        placed(torch.randn(samples, 1, 8, 8)).sum().backward()
        assert placed.held_bytes == resident
        peaks.append(placed.peak_bytes)
    kept = [[peak - states for peak, states in zip(one, resident, strict=True)] for one in peaks]
    assert kept[0] == kept[1]
    assert min(kept[0]) > 0
    assert all(one < more <= 2 * one for one, more in zip(kept[0], kept[2], strict=True))


def test_a_device_that_would_hold_more_than_its_limit_says_how_much_it_lacks() -> None:
    plan = plan_of("diamond", (0, 1, 0, 1))
    free = PlacedModel(diamond(), plan, ["cpu", "cpu"])
    states = free.peak_bytes
    tight = [PlacedDevice(CPU, one + 3000) for one in states]
    placed = PlacedModel(diamond(), plan, tight)
    with pytest.raises(RunError, match=r"device 0 lacks .*: its limit is"):
        placed(torch.randn(64, 1, 8, 8))
    with pytest.raises(RunError, match="device 1 lacks 1 B"):
        PlacedModel(diamond(), plan, [PlacedDevice(CPU), PlacedDevice(CPU, states[1] - 1)])


class Tied(nn.Module):
    """A table that the head uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)])
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def test_layers_with_a_common_parameter_train_one() -> None:
    tokens = torch.arange(6).reshape(2, 3)
    whole = Tied()
    whole(tokens).square().sum().backward()
    model = CapturedModel(whole, tokens[:1])
    plan = plan_of("diamond", (0, 1, 0)).model_copy(update={"stages": placed_stages((0, 1, 0))})
    placed = PlacedModel(model, plan, ["cpu", "cpu"])
    placed(tokens).square().sum().backward()
    # Names are those of runs; the common parameter counts once.
    expected = {f"layers.1.{name}": one for name, one in whole.named_parameters() if "blocks.1" in name}
    expected["shared.0"] = whole.blocks[0].weight
    found = dict(placed.named_parameters())
    assert found.keys() == expected.keys()
    for name, one in found.items():
        torch.testing.assert_close(one.grad, expected[name].grad)
    apart = plan.model_copy(update={"stages": placed_stages((0, 1, 1))})
    with pytest.raises(InputError, match=r"blocks\.0 and blocks\.2 share a parameter"):
        PlacedModel(model, apart, ["cpu", "cpu"])


def placed_stages(places: tuple[int, ...]) -> tuple[Stage, ...]:
    """A layer for each stage."""
    replicas = [(Replica(ranks=(place,), micro_batches=4),) for place in places]
    return tuple(Stage(layers=(index,), replicas=one) for index, one in enumerate(replicas))


def test_plans_with_replicas_other_models_and_too_few_devices_are_refused() -> None:
    with pytest.raises(InputError, match="several replicas or ranks"):
        PlacedModel(diamond(), plan_of("diamond", (0, 1, 0, 1), dp=2), ["cpu"] * 4)
    with pytest.raises(InputError, match="do not have the 5 layers"):
        PlacedModel(two_stems(), plan_of("diamond", (0, 1, 0, 1)), ["cpu"] * 2)
    with pytest.raises(InputError, match="given 1 device, and the plan has 2 ranks"):
        PlacedModel(diamond(), plan_of("diamond", (0, 1, 0, 1)), ["cpu"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": nn.Linear(4, 4)}, "^model: Linear.*, which is no model: .*weft.CapturedModel"),
        ({"plan": None}, "^plan: None: must be a Plan, as weft.plan"),
        ({"plan": "nowhere.json"}, "^nowhere.json: no such file"),
        ({"devices": ["gpu0", "cpu"]}, "^devices: 'gpu0': Invalid device string"),
        ({"devices": None}, r"^devices: None: no device of torch \(nearest valid: cpu\)$"),
        ({"devices": "cpu"}, "^devices: given 1 device, and the plan has 2 ranks"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(changed: dict[str, object], message: str) -> None:
    plan = plan_of("diamond", (0, 1, 0, 1))
    with pytest.raises(InputError, match=message) as refused:
        PlacedModel(**{"model": diamond(), "plan": plan, "devices": ["cpu"] * 2, **changed})
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("limit", ["3 GB", -1, 1.5])
def test_a_limit_that_is_no_count_of_bytes_is_refused(limit: object) -> None:
    with pytest.raises(InputError, match=r"^limit_bytes: .* is no count of bytes"):
        PlacedDevice(torch.device("cpu"), limit)  # type: ignore[arg-type]


def test_more_inputs_than_the_model_reads_are_refused() -> None:
    placed = PlacedModel(diamond(), plan_of("diamond", (0, 1, 0, 1)), ["cpu"] * 2)
    with pytest.raises(InputError, match="inputs: given 2 inputs; the model reads 1"):
        placed(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))
