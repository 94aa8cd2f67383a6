"""Laws of hidden matrices: predictions count what the optimizer takes, and products cost their flops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_models import tiny_decoder
from predict.cost.machines import MACHINE
from predict.cost.steps import GRAPH, SLOW
from predict.plans import plan_of
from small_plans import tiny

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.optimizers import MUON
from weft.planning.compile import compile_plan
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.hidden_matrices import Matrices, hidden_matrices, matrix_parameters
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import KINDS, STEP
from weft.run.stage.build import build_stage
from weft.training.optimizer import optimizers

DENSE = (*(tiny(family) for family in ("gpt", "llama", "bert")), tiny_decoder("gemma2"), tiny_decoder("phi"))
# With convolutions, which are no matrices.
HYBRIDS = (tiny_decoder("qwen3_5_text"), tiny_decoder("olmo_hybrid"))
MIXTURES = (tiny_decoder("mixtral"), tiny_decoder("qwen3_moe"))
# Their shared experts are counted as other parameters.
SHARED = (tiny_decoder("qwen2_moe"), tiny_decoder("deepseek_v2"))


def real(config: ModelConfig) -> list[torch.nn.Parameter]:
    return optimizers.hidden_matrices(build_stage(config, range(config.layers + 2), 0, torch.float32))


def counted(config: ModelConfig) -> int:
    graph = layer_graph(config)
    return sum(matrix_parameters(layer, Shape(1, graph.sequence)) for layer in graph.layers)


@pytest.mark.parametrize("config", [*DENSE, *HYBRIDS, *MIXTURES], ids=lambda config: config.name)
def test_predictions_count_the_matrices_that_are_orthogonalised(config: ModelConfig) -> None:
    assert counted(config) == sum(one.numel() for one in real(config))
    assert not hidden_matrices(layer_graph(config).layers[-1], Shape(1, 8))


@pytest.mark.parametrize("config", SHARED, ids=lambda config: config.name)
def test_fewer_matrices_are_counted_where_experts_are_shared(config: ModelConfig) -> None:
    assert 0.5 < counted(config) / sum(one.numel() for one in real(config)) < 1


@pytest.mark.parametrize("config", [*DENSE, *MIXTURES], ids=lambda config: config.name)
def test_joint_products_change_the_work_by_few_percent(config: ModelConfig) -> None:
    graph = layer_graph(config)
    shape = Shape(1, graph.sequence)
    found = sum(one.flops(5) for layer in graph.layers for one in hidden_matrices(layer, shape))
    each = (Matrices(len(one) if one.ndim == 3 else 1, *one.shape[-2:]) for one in real(config))
    assert found == pytest.approx(sum(one.flops(5) for one in each), rel=0.11)


def test_an_iteration_is_three_products() -> None:
    # 2 x 3 by 3 x 2, 2 x 2 by 2 x 2, 2 x 2 by 2 x 3; a product of n elements each takes 2 n operations.
    assert Matrices(1, 2.0, 3.0).flops(1) == Matrices(1, 3.0, 2.0).flops(1) == 24.0 + 16.0 + 24.0
    assert Matrices(4, 2.0, 3.0).flops(5) == 20 * 64.0


@pytest.mark.parametrize("measured", [None, MACHINE])
def test_a_step_takes_the_products_of_its_matrices(measured: object) -> None:
    shape, device = Shape(2, GRAPH.sequence), SLOW.groups[0].device
    model = ComputeModel(machine=measured)  # type: ignore[arg-type]
    layers = [index for index, layer in enumerate(GRAPH.layers) if hidden_matrices(layer, shape)]
    moves = MUON.model_copy(update={"orthogonalisations": 0})
    some, none = (
        model.stage_times(GRAPH, layers, shape, "fp32", device, optimizer=work) for work in (MUON, moves)
    )
    flops = sum(one.flops(5) for layer in layers for one in hidden_matrices(GRAPH.layers[layer], shape))
    assert some.update_s - none.update_s >= flops / device.flops_per_s["fp32"]
    assert replace(some, update_s=0.0) == replace(none, update_s=0.0)


def test_shares_take_their_part_of_the_products_before_the_step() -> None:
    plan = plan_of(GRAPH, SLOW, pp=1, dp=2, micro_batches=1)
    plan = plan.model_copy(update={"optimizer": MUON})
    seconds = {}
    for sharding in ("zero-0", "zero-1"):
        own = plan.model_copy(update={"sharding": sharding})
        program = compile_plan(own, GRAPH)
        occupancy = price(CostModel(graph=GRAPH, cluster=SLOW), program, own).costs.occupancy
        mine, kinds = program.columns.rank == 0, (STEP, KINDS.code("whole_matrices"))
        seconds[sharding] = [occupancy[mine & (program.columns.kind == kind)].sum() for kind in kinds]
    (whole, nothing), (step, before) = seconds["zero-0"], seconds["zero-1"]
    assert nothing == 0
    assert step < whole / 2 < step + before
