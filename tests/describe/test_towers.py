"""Models of towers: sizes, work, kept bytes and messages equal the real modules; towers stand apart."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_bytes import saved_by_autograd
from torch.utils.flop_counter import FlopCounterMode
from tower_jobs import inputs_of_towers

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.families.transformer import LOSS_BYTES_PER_LOGIT, TOKEN_BYTES
from weft.describe.graph_models import tower_config
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig, model_from
from weft.describe.models import PRESETS, resolve_model
from weft.errors import InputError
from weft.run.stage.build import build_stage

NAMES = tuple(name for name, config in PRESETS.items() if config.towers is not None)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    some = st.lists(st.integers(2, 9), min_size=1, max_size=4)
    size, depth = st.integers(1, 6), draw(st.integers(1, 3))
    if draw(st.booleans()):
        heads = draw(st.integers(1, 2))
        return tower_config(
            "drawn",
            family="multimodal-transformer",
            depth=depth,
            tokens=draw(some),
            hidden=8 * heads,
            heads=heads,
            feed_forward=draw(size),
            vocabulary=2,
            sequence=draw(st.integers(2, 5)),
        )
    tables = draw(some) if draw(st.booleans()) else ()
    return tower_config(
        "drawn",
        family="dlrm" if tables else "candle-uno",
        depth=depth,
        features=draw(some),
        tables=tables,
        looked_up=draw(size) if tables else 0,
        joint_depth=draw(st.integers(0, 2)),
        hidden=draw(size) if tables else 0,
        feed_forward=draw(size),
    )


@settings(max_examples=15)
@given(configs(), st.integers(2, 3))
def test_every_amount_is_that_of_the_real_module(config: ModelConfig, samples: int) -> None:
    graph, shape = layer_graph(config), Shape(samples, config.sequence)
    model = build_stage(config, range(config.layers + 2), 0, torch.float32)
    inputs = inputs_of_towers(config, samples)
    assert graph.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert len(graph.layers) == config.layers + 2
    kept = saved_by_autograd(lambda: model(*inputs), model.parameters())
    # The loss is the task's: its logits, their copies and labels are not the module's.
    loss = samples * ((4 + LOSS_BYTES_PER_LOGIT) * config.vocabulary + TOKEN_BYTES)
    assert sum(4 * one.kept(shape) + one.kept_bytes(shape) for one in graph.layers) - loss == kept
    values: list[torch.Tensor] = []
    for place, (layer, function) in enumerate(
        zip(graph.layers, model.layer_functions(inputs[0]), strict=True)
    ):
        read = [inputs[number] for number in graph.inputs_read[place]]
        with FlopCounterMode(display=False) as counter:
            values.append(function(*read, *(values[one] for one in sorted(graph.feeders[place]))))
        # The counter does not know the kernel of attention on a CPU.
        unseen = sum(one.flops(shape) for one in layer.forward.matmuls if one.kernel != "product")
        assert layer.forward.flops(shape) - unseen == counter.get_total_flops()
        assert layer.name == "head" or layer.sent(shape) == values[-1].numel()


@settings(max_examples=25)
@given(configs())
def test_towers_follow_each_other_and_only_the_end_joins_them(config: ModelConfig) -> None:
    graph = layer_graph(config)
    towers = config.towers
    assert towers is not None
    count = len(towers.tokens) + len(towers.features) + len(towers.tables)
    assert [number for number, _ in graph.inputs] == list(range(count))
    firsts = [layer for _, layer in graph.inputs]
    joint = next(place for place, one in enumerate(graph.layers) if one.name in ("joint.0", "head"))
    ends = [*(first - 1 for first in firsts[1:]), joint - 1]
    assert graph.feeders[joint] == frozenset(ends)
    chains = {(layer, layer + 1) for layer in range(len(graph.layers) - 1)} - {(one, one + 1) for one in ends}
    assert set(graph.edges) == chains | {(end, joint) for end in ends}
    assert graph.is_chain == (count == 1)


@settings(max_examples=15)
@given(configs())
def test_files_read_back_and_layers_of_one_kind_cost_the_same(config: ModelConfig) -> None:
    graph = layer_graph(config)
    assert LayerGraph.from_json(graph.to_json()) == graph
    assert model_from(json.loads(json.dumps(asdict(config)))) == config
    kinds = [layer.kind for layer in graph.layers]
    assert len(set(kinds)) == len(set(zip(kinds, graph.alike, strict=True)))


def test_first_layers_have_no_gradients_of_samples() -> None:
    for name in NAMES:
        graph = layer_graph(PRESETS[name])
        for _, layer in graph.inputs:
            first = graph.layers[layer]
            assert first.backward_input.memory.terms == first.backward_input.matmuls == ()
            assert first.backward_weight.memory.terms


# Jeon et al., arXiv 2406.17145, appendix A.2.
@pytest.mark.parametrize(
    ("name", "towers", "depth", "width"),
    [("mmt", 4, 8, 1024), ("two-branch", 2, 4, 1024), ("dlrm", 14, 4, 4096), ("candle-uno", 7, 4, 4096)],
)
def test_presets_have_their_published_size(name: str, towers: int, depth: int, width: int) -> None:
    config = PRESETS[name]
    assert config.towers is not None
    assert layer_graph(config).input_count == towers
    assert (config.towers.depth, config.hidden if config.heads else config.feed_forward) == (depth, width)


def test_samples_of_features_have_no_sequence() -> None:
    with pytest.raises(InputError, match="8 tokens, but dlrm is made for samples of 1"):
        resolve_model("dlrm", sequence=8)
    assert resolve_model("mmt", sequence=64).sequence == 64
    assert [PRESETS[name].unit for name in ("mmt", "dlrm", "vit-tiny")] == ["tokens", "samples", "images"]
