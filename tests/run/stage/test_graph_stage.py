"""Stages of models that are graphs: any cut has the same parameters, inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tower_jobs import batches_of_vectors, has_several_inputs, inputs_of_towers

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage
from weft.run.stage.wiring import Wired
from weft.run.workspace import inputs_of
from weft.training.open_run import require_inputs

NAMES = (
    "image-text-tiny",
    "mmt-tiny",
    "dlrm-tiny",
    "candle-uno-tiny",
    "encoder-decoder-tiny",
    "own_models:conditioned",
)
SAMPLES = 3


def inputs_for(config: ModelConfig) -> tuple[torch.Tensor, ...]:
    if has_several_inputs(config):
        batch = batches_of_vectors(config, SimpleNamespace(micro_batch_size=SAMPLES), 0)  # type: ignore[arg-type]
        return inputs_of(batch(0)[0])
    return inputs_of_towers(config, SAMPLES)


def stage_of(config: ModelConfig, layers: Sequence[int]) -> Any:
    stage = build_stage(config, layers, 0, torch.float64)
    assert isinstance(stage, Wired)
    return stage


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_computes_the_whole(name: str) -> None:
    config = resolve_model(name)
    count = config.layers + 2
    whole, inputs = stage_of(config, range(count)), inputs_for(config)
    values: dict[int, torch.Tensor] = {}
    for layer in range(count):
        one = stage_of(config, [layer])
        (values[layer],) = one(*values_read(one, inputs, values))
        assert one.value_shape(layer, SAMPLES) == tuple(values[layer].shape)
    for draw in range(5):
        owners = np.random.default_rng(draw).integers(3, size=count)
        cut = [np.flatnonzero(owners == stage).tolist() for stage in range(3)]
        stages = [whole] if draw == 0 else [stage_of(config, layers) for layers in cut if layers]
        parameters = {key: value for stage in stages for key, value in stage.state_dict().items()}
        assert parameters.keys() == whole.state_dict().keys()
        assert all(torch.equal(value, parameters[key]) for key, value in whole.state_dict().items())
        for stage in stages:
            outputs = stage(*values_read(stage, inputs, values))
            for gives, value in zip(stage.gives, outputs, strict=True):
                assert torch.allclose(value, values[gives], rtol=1e-12, atol=1e-12)


def values_read(
    stage: Any, inputs: Sequence[torch.Tensor], values: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    """What a stage reads, from all inputs of samples and the outputs of all layers."""
    return [*(inputs[number] for number in stage.inputs), *(values[taken] for taken in stage.takes)]


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_reads_the_inputs_of_its_own_layers(name: str) -> None:
    config = resolve_model(name)
    graph = layer_graph(config)
    for number, layer in graph.inputs:
        assert tuple(stage_of(config, [layer]).inputs) == (number,)
    assert tuple(stage_of(config, [config.layers + 1]).inputs) == ()


def opened(name: str, *shapes: Sequence[int]) -> tuple[Any, Any]:
    """A job of that model, and a task whose samples have inputs of these shapes."""
    config = resolve_model(name)
    problem = SimpleNamespace(model=config, job=SimpleNamespace(graph=layer_graph(config)))

    def batch(
        samples: np.ndarray, *, held_out: bool = False
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return tuple(torch.zeros(len(samples), *shape) for shape in shapes), torch.zeros(len(samples))

    return SimpleNamespace(problem=problem), SimpleNamespace(batch=batch)


def test_samples_with_other_inputs_are_refused() -> None:
    require_inputs(*opened("own_models:conditioned", (1, 8, 8), (3,)))
    require_inputs(*opened("mmt-tiny", (16,), (16,)))
    for name, shapes, problem in (
        ("own_models:conditioned", [(1, 8, 8)], "samples have 1 input; own_models:conditioned reads 2"),
        ("mmt-tiny", [(16,)] * 3, "samples have 3 inputs; mmt-tiny reads 2"),
        (
            "own_models:conditioned",
            [(1, 8, 8), (4,)],
            r"shapes \[1, 8, 8\] and \[4\]; own_models:conditioned reads \[1, 8, 8\] and \[3\]",
        ),
    ):
        with pytest.raises(InputError, match=problem):
            require_inputs(*opened(name, *shapes))
