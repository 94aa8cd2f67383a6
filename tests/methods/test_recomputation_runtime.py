"""Laws: recomputed layers give the gradients of kept ones, keep their inputs alone, and run again once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from decoder_models import tiny_decoder
from equality_table import Row
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool
from small_jobs import batch_of, loss_of, make_runtime
from small_plans import make_program, tiny
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.plan import Recompute
from weft.errors import RunError
from weft.methods.recomputation.runtime import PRODUCTS, recomputed
from weft.predict.cost.memory import stage_input_bytes, stage_product_bytes
from weft.run.stage.build import build_stage
from weft.run.stage.layers import LayerFunction, layer_functions, run_layers
from weft.run.stage.split_backward import run_input_part
from weft.run.stage.stage_module import StageModule

FAMILIES = ("gpt", "llama")
LAYERS = 4
RECOMPUTES = get_args(Recompute)


class Census(TorchDispatchMode):
    """Counts the bytes of tensors made under it that are still alive, without those of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        held = [*module.parameters(), *module.buffers()]
        self._held = {StorageWeakRef(tensor.untyped_storage()) for tensor in held}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return made

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._made[StorageWeakRef(storage)] = storage.nbytes()

    @property
    def bytes(self) -> int:
        return sum(size for made, size in self._made.items() if not made.expired() and made not in self._held)


def stage_of(family: str, first: int, end: int, dropout: float = 0.0, *, tied: bool = False) -> StageModule:
    model = tiny(family, layers=LAYERS, tied=tied) if family in (*FAMILIES, "bert") else tiny_decoder(family)
    stage = build_stage(model, range(first, end), 3, torch.float32)
    for part in stage.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
    return stage


def inputs_of(stage: StageModule) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = stage.input_shape(2, stage.config.sequence)
    if stage.embeds:
        return torch.randint(stage.config.vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator).requires_grad_()


def gradients(stage: StageModule, *, recompute: Recompute, split: bool) -> list[torch.Tensor | None]:
    """Of the weights and the input, for two micro-batches whose backwards come after both forwards."""
    found: list[torch.Tensor | None] = []
    waiting = []
    for number in range(2):
        inputs = inputs_of(stage)
        torch.manual_seed(number)
        output = run_layers(layer_functions(stage, inputs), inputs, recompute=recompute, draws=True)
        waiting.append((inputs, output))
    for inputs, output in waiting:
        gradient = torch.ones_like(output)
        if split:
            run_input_part(stage, [inputs], [output], [gradient]).run()
        else:
            output.backward(gradient)
        found.append(inputs.grad)
    found += [parameter.grad for parameter in stage.parameters()]
    for parameter in stage.parameters():
        parameter.grad = None
    return found


def test_a_recomputed_mixture_gives_the_same_bits() -> None:
    stage = stage_of("mixtral", 1, 3)
    kept, *others = (gradients(stage, recompute=recompute, split=False) for recompute in RECOMPUTES)
    for again in others:
        assert all(torch.equal(*pair) for pair in zip(kept, again, strict=True))


@given(
    family=st.sampled_from(FAMILIES),
    cut=st.tuples(st.integers(0, LAYERS + 1), st.integers(1, LAYERS + 2)).filter(lambda cut: cut[0] < cut[1]),
    dropout=st.sampled_from([0.0, 0.4]),
    split=st.booleans(),
)
def test_recomputed_layers_give_the_same_bits(
    family: str, cut: tuple[int, int], dropout: float, split: bool
) -> None:
    stage = stage_of(family, *cut, dropout)
    kept, *others = (gradients(stage, recompute=recompute, split=split) for recompute in RECOMPUTES)
    for again in others:
        for expected, found in zip(kept, again, strict=True):
            if expected is None or found is None:
                assert expected is found
            else:
                assert torch.equal(found, expected)


@pytest.mark.parametrize("split", [False, True])
def test_a_tied_weight_is_added_to_twice(split: bool) -> None:
    stage = stage_of("gpt", 0, LAYERS + 2, tied=True)
    kept, *others = (gradients(stage, recompute=recompute, split=split) for recompute in RECOMPUTES)
    for again in others:
        assert all(torch.equal(*pair) for pair in zip(kept[2:], again[2:], strict=True))


def bytes_kept(stage: StageModule, *, recompute: Recompute) -> int:
    """Bytes that a forward pass leaves behind, its input with them and its output, sent on, without."""
    inputs = inputs_of(stage).detach()
    inputs.requires_grad_(inputs.is_floating_point())
    with Census(stage) as census:
        census.add(inputs)
        value = run_layers(layer_functions(stage, inputs), inputs, recompute=recompute, draws=False)
        return census.bytes - value.untyped_storage().nbytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first", "end"), [(0, LAYERS), (1, LAYERS + 1), (2, LAYERS + 2)])
def test_a_stage_keeps_the_inputs_of_its_layers_as_predicted(family: str, first: int, end: int) -> None:
    stage = stage_of(family, first, end)
    shape = Shape(2, stage.config.sequence)
    expected = stage_input_bytes(layer_graph(stage.config), range(first, end), shape, "fp32")
    # Rotary angles are shared by all blocks and do not grow with the micro-batch: no part of the prediction.
    head_size = stage.config.hidden // stage.config.heads
    angles = 2 * stage.config.sequence * head_size * 4 if family == "llama" else 0
    assert bytes_kept(stage, recompute="full") == expected + angles
    assert bytes_kept(stage, recompute="none") > 8 * expected


@pytest.mark.parametrize(
    ("family", "first", "end"),
    [
        *((family, first, first + LAYERS) for family in FAMILIES for first in range(3)),
        ("bert", 1, LAYERS + 1),
        ("bert", 2, LAYERS + 2),
    ],
)
def test_a_stage_keeps_what_its_products_leave_as_predicted(family: str, first: int, end: int) -> None:
    stage = stage_of(family, first, end)
    graph, layers, shape = layer_graph(stage.config), range(first, end), Shape(2, stage.config.sequence)
    inputs = inputs_of(stage).detach()
    inputs.requires_grad_(inputs.is_floating_point())
    functions = list(layer_functions(stage, inputs))
    if stage.ends:
        # A loss needs the logits, which nothing follows without it.
        last = functions[-1]
        functions[-1] = lambda value: last(value).log_softmax(-1)
    with Census(stage) as census:
        census.add(inputs)
        value = run_layers(functions, inputs, recompute="selective", draws=False)
        kept = census.bytes - value.untyped_storage().nbytes()
    head_size = stage.config.hidden // stage.config.heads
    angles = 2 * stage.config.sequence * head_size * 4 if family == "llama" else 0
    expected = stage_input_bytes(graph, layers, shape, "fp32")
    expected += stage_product_bytes(graph, layers, shape, "fp32")
    assert kept == expected + angles
    assert kept < bytes_kept(stage, recompute="none")


class Calls(TorchDispatchMode):
    """Counts calls of products and of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.products += function in PRODUCTS
        self.others += function not in PRODUCTS
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_products_are_not_called_again(family: str) -> None:
    stage = stage_of(family, 1, 3)
    counts = {}
    for recompute in RECOMPUTES:
        inputs = inputs_of(stage)
        functions = layer_functions(stage, inputs)
        output = run_layers(functions, inputs, recompute=recompute, draws=False).sum()
        with Calls() as calls:
            output.backward()
        counts[recompute] = calls
    assert counts["selective"].products == counts["none"].products < counts["full"].products
    assert counts["selective"].others > counts["none"].others


def test_a_layer_that_writes_over_its_products_is_named() -> None:
    linear = nn.Linear(3, 3)
    inputs = torch.ones(2, 3).requires_grad_()
    output = recomputed(lambda value: linear(value).mul_(2.0).exp(), inputs, draws=False, keep_products=True)
    with pytest.raises(RunError, match=r"wrote over what aten\.addmm\.default gave; recompute it fully"):
        output.sum().backward()


class Counted(nn.Module):
    """A layer that counts its runs."""

    def __init__(self, function: LayerFunction) -> None:
        super().__init__()
        self.function = function
        self.runs = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.function(inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_layers_run_again_once(family: str, split: bool) -> None:
    stage = stage_of(family, 1, LAYERS + 2)
    inputs = inputs_of(stage)
    layers = [Counted(function) for function in layer_functions(stage, inputs)]
    output = run_layers(layers, inputs, recompute="full", draws=False).sum()
    assert [layer.runs for layer in layers] == [1] * (LAYERS + 1)
    if split:
        part = run_input_part(stage, [inputs], [output], [None])
        # All of it belongs to the input part, which the weight part goes on from.
        assert [layer.runs for layer in layers] == [2] * (LAYERS + 1)
        part.run()
    else:
        output.backward()
    assert [layer.runs for layer in layers] == [2] * (LAYERS + 1)


def test_what_is_not_needed_is_not_computed_again() -> None:
    first, last = Counted(nn.Linear(3, 3)), Counted(nn.Identity())
    inputs = torch.ones(2, 3).requires_grad_()
    recomputed(lambda value: last(first(value) + 1), inputs, draws=False).sum().backward()
    # A sum keeps nothing: when the linear layer has its input, nothing is left to make.
    assert (first.runs, last.runs) == (2, 1)


def test_numbers_drawn_in_between_change_nothing() -> None:
    dropout = nn.Dropout(0.5)
    inputs = torch.ones(64).requires_grad_()
    output = recomputed(dropout, inputs, draws=True)
    torch.rand(7)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(inputs.grad, output)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_without_layers_is_one_layer() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    assert layer_functions(module, torch.ones(3)) == (module,)


def count_losses(rank: int, ranks: int, row: Row) -> list[bool]:
    """Of each call of the loss, whether it is differentiated."""
    calls = []

    def counted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(logits.requires_grad)
        return loss_of(logits, targets)

    plan = row.plan
    runtime = make_runtime(rank, row.model, plan, make_program(row.model, plan), loss_fn=counted)
    runtime.step(0, batch_of(row.model, plan, 0))
    runtime.close()
    return calls


@pytest.mark.processes
@pytest.mark.parametrize(("recompute", "calls"), [("none", 3), ("full", 6)])
def test_the_loss_belongs_to_the_last_layer(
    worker_pool: WorkerPool, recompute: Recompute, calls: int
) -> None:
    row = Row(tiny(), "1f1b", micro_batches=3, recompute=recompute)
    assert worker_pool.run(count_losses, row, ranks=1) == [[True] * calls]


def test_a_layer_that_changes_its_mind_is_named() -> None:
    exponents: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda value: value, torch.exp]
    inputs = torch.ones(3).requires_grad_()
    output = recomputed(lambda value: exponents.pop()(value).exp(), inputs, draws=False)
    with pytest.raises(RunError, match="did not compute again what it had computed at first"):
        output.sum().backward()
