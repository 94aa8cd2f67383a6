"""Convolutional networks: sizes, work and kept bytes equal the real modules; their files are read."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from convolutional_jobs import FAMILIES, tiny, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetConfig, ResNetForImageClassification

from weft.describe.amount import Shape
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.families.transformer import LOSS_BYTES_PER_LOGIT, TOKEN_BYTES
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import model_from
from weft.describe.models import PRESETS, resolve_model
from weft.errors import InputError
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.run.stage.batch_norm import StepBatchNorm
from weft.run.stage.build import build_stage
from weft.run.stage.families.resnet import resnet_config

SEQUENCE = 1


@st.composite
def configs(draw):
    family = draw(st.sampled_from(FAMILIES))
    width, depth = st.integers(1, 3), st.integers(1, 2)
    changes = {"channels": draw(st.sampled_from([1, 3])), "vocabulary": draw(st.integers(2, 9))}
    if family == "alexnet":
        return tiny(family, widths=tuple(draw(width) for _ in range(5)), pooled_size=draw(width), **changes)
    groups = draw(st.integers(1, 3))
    bottleneck = draw(st.booleans())
    changes |= {
        "widths": tuple(4 * draw(width) for _ in range(groups)),
        "depths": tuple(draw(depth) for _ in range(groups)),
        "image_size": draw(st.integers(18, 24)),
    }
    if family == "resnet":
        return tiny(family, bottleneck=bottleneck, hidden=4 * draw(width), **changes)
    return tiny(family, pooled_size=draw(width), **changes)


def saved_bytes(model, inputs):
    """Bytes of what autograd saves, every storage once; parameters and the norms' own tensors left out."""
    owned = [*model.parameters(), *model.buffers()]
    owned += [part._last for part in model.modules() if isinstance(part, StepBatchNorm)]
    own = {tensor.untyped_storage().data_ptr() for tensor in owned}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
        total = sum(saved.values())
    return total, output


@settings(max_examples=12)
@given(configs(), st.integers(2, 3))
def test_every_amount_is_that_of_the_real_module(config, samples):
    graph, shape = layer_graph(config), Shape(samples, SEQUENCE)
    model = whole(config, torch.float32)
    inputs = torch.zeros(samples, config.channels, config.image_size, config.image_size)
    model(inputs)
    kept, logits = saved_bytes(model, inputs)
    assert graph.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert len(graph.layers) == config.layers + 2
    # The loss is the task's: its logits, their copies and labels are not the module's.
    loss = samples * ((4 + LOSS_BYTES_PER_LOGIT) * config.vocabulary + TOKEN_BYTES)
    assert sum(4 * layer.kept(shape) + layer.kept_bytes(shape) for layer in graph.layers) - loss == kept
    value = inputs
    for layer, function in zip(graph.layers, model.layer_functions(inputs), strict=True):
        with FlopCounterMode(display=False) as counter:
            value = function(value)
        assert layer.forward.flops(shape) == counter.get_total_flops()
        assert layer.name.startswith("head") or layer.sent(shape) == value.numel()
    assert value.shape == logits.shape == (samples, config.vocabulary)


@settings(max_examples=20)
@given(configs())
def test_backward_is_twice_forward_but_for_the_images(config):
    first, *others = layer_graph(config).layers
    shape = Shape(2, SEQUENCE)
    assert first.flops(shape) == 2 * first.forward.flops(shape)
    assert first.backward_input.memory(shape) == first.backward_input.kernels == 0
    assert all(layer.flops(shape) == 3 * layer.forward.flops(shape) for layer in others)


@settings(max_examples=20)
@given(configs())
def test_a_graph_is_a_chain_and_reads_back_and_layers_of_one_kind_cost_the_same(config):
    graph = layer_graph(config)
    assert graph.is_chain
    assert LayerGraph.from_json(graph.to_json()) == graph
    kinds = {}
    for layer in graph.layers:
        assert kinds.setdefault(layer.kind, replace(layer, name="")) == replace(layer, name="")
    assert model_from(json.loads(json.dumps(asdict(config)))) == config


# Published work of one image forward, in multiply-adds: torchvision's pages of the models.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("resnet-18", 1.814),
        ("resnet-34", 3.664),
        ("resnet-50", 4.089),
        ("vgg-11", 7.609),
        ("vgg-16", 15.470),
        ("vgg-19", 19.632),
        ("alexnet", 0.714),
    ],
)
def test_presets_do_their_published_work(name, billions):
    shape = Shape(1, SEQUENCE)
    flops = sum(layer.forward.flops(shape) for layer in layer_graph(PRESETS[name]).layers)
    assert flops / 2e9 == pytest.approx(billions, rel=2e-3)


def test_stages_of_unlike_layers_are_cut_where_the_work_is():
    graph = layer_graph(PRESETS["vgg-16"])
    job = Job(graph=graph, cluster=parse_cluster("4xa100-80gb"), global_batch=32, sequence=SEQUENCE)
    layout = Layout(pp=4, dp=1, loops=1, micro_batch_size=4, schedule="1f1b")
    plan = build_plan(job, layout, flops_per_layer(job))
    work = flops_per_layer(job)
    stages = [sum(work[layer] for layer in stage.layers) for stage in plan.stages]
    assert max(stages) < 1.2 * sum(stages) / len(stages)
    assert len({len(stage.layers) for stage in plan.stages}) > 1


def test_no_layer_is_divided_over_tensor_ranks():
    graph = layer_graph(PRESETS["resnet-18"])
    assert graph.refuse_tensor(2) == "tp 2: no layer of the model can be divided over tensor ranks"
    job = Job(graph=graph, cluster=parse_cluster("2xa100-80gb"), global_batch=4, sequence=SEQUENCE)
    layout = Layout(
        pp=1,
        dp=1,
        tp=2,
        loops=1,
        micro_batch_size=4,
        schedule="1f1b",
    )
    assert "tp 2" in refuse(job, layout)
    with pytest.raises(InputError, match="tp 2: no layer of the model can be divided"):
        build_stage(tiny("resnet"), [0], 0, torch.float32, tensor_share=(0, 2))


def test_files_of_transformers_are_read(tmp_path):
    for name, given_config in {
        "resnet-18": ResNetConfig(
            hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000
        ),
        "resnet-50": ResNetConfig(num_labels=1000),
        "resnet-tiny": resnet_config(PRESETS["resnet-tiny"]),
    }.items():
        given_config.save_pretrained(tmp_path / name)
        assert resolve_model(str(tmp_path / name)) == PRESETS[name]


def test_names_are_those_of_transformers():
    for config in (PRESETS["resnet-18"], tiny("resnet", bottleneck=True)):
        with torch.device("meta"):
            theirs = ResNetForImageClassification(resnet_config(config)).state_dict()
        ours = whole(config, torch.float32).state_dict()
        assert {name: value.shape for name, value in ours.items()} == {
            name: value.shape for name, value in theirs.items()
        }


def test_names_are_those_of_torchvision():
    features = {
        "vgg-11": [0, 3, 6, 8, 11, 13, 16, 18],
        "vgg-16": [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
        "alexnet": [0, 3, 6, 8, 10],
    }
    classifier = {"vgg-11": [0, 3, 6], "vgg-16": [0, 3, 6], "alexnet": [1, 4, 6]}
    for name, places in features.items():
        sizes = PRESETS[name].convolutions
        shrunk = {"convolutions": replace(sizes, widths=tuple(width // 32 for width in sizes.widths))}
        config = replace(PRESETS[name], feed_forward=8, **shrunk)
        modules = [f"features.{place}" for place in places]
        modules += [f"classifier.{place}" for place in classifier[name]]
        expected = {f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")}
        assert set(whole(config, torch.float32).state_dict()) == expected


RESNET = {"model_type": "resnet", "hidden_sizes": [8, 16], "depths": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu' is not supported .nearest valid: relu"),
        ({"downsample_in_first_stage": True}, r"downsample_in_first_stage: True is not .*: false"),
        ({"layer_type": "wide"}, r"layer_type: 'wide' is not one of basic, bottleneck"),
        ({"depths": [1]}, r"depths: 2 hidden_sizes and 1 depths are given; as many of each are needed"),
        ({"depths": [1, 0]}, r"depths: \[1, 0\]: must be integers of at least 1"),
        ({"num_channels": "3"}, r"num_channels: '3': must be an integer of at least 1"),
        ({"id2label": 3}, "id2label: 3: must be an object"),
    ],
)
def test_what_the_layers_do_not_stand_for_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**RESNET, **changes}))
    with pytest.raises(InputError, match=message) as refused:
        resolve_model(str(tmp_path))
    assert len(refused.value.violations) == 1


def test_absent_sizes_take_the_defaults_of_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RESNET))
    config = resolve_model(str(tmp_path))
    assert (config.channels, config.hidden, config.vocabulary, config.image_size) == (3, 64, 2, 224)
    assert config.convolutions.bottleneck


def test_images_that_are_too_small_and_sequences_are_refused():
    with pytest.raises(InputError, match="maps of 3 x 3 are too small for a window of 11 x 11"):
        layer_graph(tiny("alexnet", image_size=3))
    with pytest.raises(InputError, match="a batch norm would see maps of 1 x 1"):
        layer_graph(tiny("resnet", image_size=8))
    with pytest.raises(InputError, match="8 tokens, but resnet-18 reads images of 1"):
        resolve_model("resnet-18", sequence=8)
