"""Laws of products in 8 bits as they run, emulated; rows of the equality table say so of layouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_models import SEQUENCE
from pool import WorkerPool
from pooled_runs import trained
from small_jobs import SEED
from small_plans import divisible
from stopped_runs import saved, text_run, through_and_stopped
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.capture.block_model import BlockModel
from weft.errors import InputError
from weft.methods.fp8_linears.options import RECIPES, Fp8LinearsTable, choices_of
from weft.methods.fp8_linears.runtime import Fp8Product, convert
from weft.run.stage.build import build_stage
from weft.run.stage.compiled import compile_stage
from weft.run.stage.families.own import OwnStage
from weft.run.stage.stage_module import StageModule

pytest.importorskip("torchao", reason='fp8 products need torchao: pip install ".[fp8]"')
FAMILIES = ("gpt", "llama", "bert", "vit")


def stage_of(
    family: str, dtype: torch.dtype = torch.float32, layers: Sequence[int] = range(4)
) -> StageModule:
    config = replace(divisible(family), hidden=32, feed_forward=48)
    stage = build_stage(config, layers, SEED, dtype)
    assert isinstance(stage, StageModule)
    return stage


def linears(stage: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, Conv1D, Fp8Product)
    return {name: one for name, one in stage.named_modules() if isinstance(one, kinds)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_chosen_blocks_and_only_these_are_converted(family: str, recipe: str) -> None:
    stage = stage_of(family)
    before, parameters = linears(stage), dict(stage.named_parameters())
    inside = {name for name, one in before.items() if one in set(stage.block(2).modules())}
    convert(stage, 2, recipe)
    after = linears(stage)
    assert inside
    assert after.keys() == before.keys()
    assert {name for name, one in after.items() if isinstance(one, Fp8Product)} == inside
    found = dict(stage.named_parameters())
    assert list(found) == list(parameters)
    assert all(found[name] is one for name, one in parameters.items())


def test_a_side_that_16_does_not_divide_keeps_its_product() -> None:
    stage = build_stage(divisible("gpt"), range(4), SEED, torch.float32)
    convert(stage, 1, "tensorwise")
    kinds = Counter(type(one).__name__ for name, one in linears(stage).items() if ".0." in name)
    # Of four products those of the feed-forward have 24 columns, or rows.
    assert kinds == {"Fp8Product": 2, "Conv1D": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_products_are_refused(family: str) -> None:
    config = replace(divisible(family), hidden=24, feed_forward=40)
    stage = build_stage(config, range(4), SEED, torch.float32)
    with pytest.raises(InputError, match="layer 1 has no linear product of multiples of 16"):
        convert(stage, 1, "tensorwise")
    with pytest.raises(InputError, match="layer 0 has no linear product"):
        convert(nn.Linear(16, 16), 0, "tensorwise")


@settings(max_examples=20)
@given(st.integers(0, 100), st.sampled_from(RECIPES), st.booleans())
def test_outputs_and_gradients_are_near_those_without_rounding(
    seed: int, recipe: str, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = Conv1D(48, 32) if transposed else nn.Linear(32, 48)
    with torch.no_grad():
        plain.weight.normal_(generator=generator)
    inputs, weights = torch.randn(2, 16, 32, generator=generator), torch.randn(2, 16, 48, generator=generator)
    found = []
    for module in (plain, Fp8Product(plain, recipe)):
        own = inputs.clone().requires_grad_()
        output = module(own)
        (output * weights).sum().backward()
        found.append([output.detach(), own.grad, plain.weight.grad, plain.bias.grad])
        plain.weight.grad = plain.bias.grad = None
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        # Three bits of a mantissa are left, or two in gradients: a relative error of 2^-3 per factor.
        assert (one - other).norm() / one.norm() < 0.1
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][3], found[1][3])


def kept_bytes(stage: StageModule, inputs: torch.Tensor) -> int:
    """Bytes that the first block saves for its backward pass, every storage once and no parameter."""
    own = {one.untyped_storage()._cdata for one in stage.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    block = stage.layer_functions(torch.zeros(2, stage.config.sequence, dtype=torch.long))[1]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(inputs)
    assert output.dtype == inputs.dtype
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_the_same_bytes_for_its_backward_pass(
    family: str, recipe: str, dtype: torch.dtype
) -> None:
    stage = stage_of(family, dtype)
    inputs = torch.randn(2, stage.config.sequence, 32, dtype=dtype, requires_grad=True)
    plain = kept_bytes(stage, inputs)
    convert(stage, 1, recipe)
    assert kept_bytes(stage, inputs) == plain > 0


@pytest.mark.compiler
def test_converted_layers_are_compiled_whole() -> None:
    found = []
    for compiles in (False, True):
        # A block alone: to compile takes long.
        stage = stage_of("gpt", layers=(1,))
        convert(stage, 1, "tensorwise")
        generator = torch.Generator().manual_seed(SEED)
        inputs = torch.randn(2, stage.config.sequence, 32, generator=generator, requires_grad=True)
        if compiles:
            compile_stage(stage, inputs, dtype=torch.float32, recompute="none")
        output = stage(inputs)
        output.sum().backward()
        found.append((output.detach(), inputs.grad, *(one.grad for one in stage.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def middle() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 16))


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 20), nn.Linear(20, 16))


def wide_text() -> BlockModel:
    """Four layers from tokens to logits, the third with products that 16 does not divide."""
    return BlockModel(
        [lambda: nn.Embedding(11, 16), middle, odd, lambda: nn.Linear(16, 16)],
        example=torch.zeros(1, SEQUENCE, dtype=torch.long),
        classes=16,
    )


def test_linear_layers_of_ones_own_are_converted_but_the_first_and_last() -> None:
    model = wide_text()
    (choice,) = choices_of(Fp8LinearsTable(), model.layer_graph())
    assert choice.layers == (1,)
    stage = OwnStage(model, range(4), SEED, torch.float32)
    convert(stage, 1, "tensorwise")
    found = {name for name, one in linears(stage).items() if isinstance(one, Fp8Product)}
    assert found == {"layers.1.0", "layers.1.2", "layers.1.3"}
    with pytest.raises(InputError, match="layer 2 has no linear product"):
        convert(stage, 2, "tensorwise")
    whole = OwnStage(
        BlockModel([lambda: nn.Linear(16, 16)] * 3, example=torch.zeros(1, 16), classes=16),
        range(3),
        SEED,
        torch.float32,
    )
    convert(whole, 1, "rowwise")
    assert isinstance(whole.layers["1"], Fp8Product)


def test_a_stage_that_tensor_ranks_divide_is_refused() -> None:
    stage = build_stage(divisible("llama", heads=4), range(4), SEED, torch.float32, tensor_share=(0, 2))
    with pytest.raises(InputError, match="no linear product of multiples of 16 on one rank"):
        convert(stage, 1, "tensorwise")


STEPS = 24
EMPIRICAL = """
[goal]
contract = "empirical"
"""
EIGHT_BITS = (
    EMPIRICAL
    + """
[fp8-linears]
recipe = "rowwise"
"""
)


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_run_is_resumed_to_the_same_bits(tmp_path: Path, worker_pool: WorkerPool) -> None:
    source = text_run(tmp_path, EIGHT_BITS)
    through, _ = through_and_stopped(worker_pool, tmp_path, source, steps=4, stop=2)
    assert '"fp8-linears"' in (through / "plan.json").read_text()


def losses_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


@pytest.mark.tables
@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_losses_are_near_those_in_bf16_and_each_goes_on_from_the_other(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    sources, runs = [], []
    for name, more in (("bf16", EMPIRICAL), ("fp8", EIGHT_BITS)):
        text = text_run(tmp_path, more, steps=STEPS)
        sources.append(tmp_path / f"{name}.toml")
        sources[-1].write_text(text.replace("global_batch = 4", 'global_batch = 4\nprecision = "bf16"'))
        runs.append(trained(worker_pool, sources[-1], directory=tmp_path / name))
    plain, found = map(losses_of, runs)
    assert len(plain) == len(found) == STEPS
    assert plain != found
    assert plain[-1] < plain[0] / 2
    assert abs(found[-1] - plain[-1]) < 0.1 * plain[0]
    kept = [{key: (value.shape, value.dtype) for key, value in saved(run).items()} for run in runs]
    assert kept[0] == kept[1]
    for source, run, told in zip(sources[::-1], runs, (plain, found), strict=True):
        trained(worker_pool, source, resume=run, steps=STEPS + 2)
        assert '"fp8-linears"' in (run / "plan.json").read_text() or source is sources[0]
        assert losses_of(run)[:STEPS] == told
        assert losses_of(run)[-1] < 1.2 * told[-1]
