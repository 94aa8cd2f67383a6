"""Laws: low-rank products are counted as they are trained, frozen layers as they lie there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from asked_methods import with_low_rank
from described_decoders import described
from small_plans import make_plan, tiny

from weft.cli.main import run
from weft.describe.added_layers import trained_graph
from weft.describe.amount import Shape
from weft.describe.block_products import block_products
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice
from weft.describe.plan_file import check_plan
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.lora.options import Base
from weft.planning.problem import problem_of_run

CLUSTER = parse_cluster("8xa100-80gb")
MODEL = {"model": {"preset": "llama-3-8b"}}


def test_the_parameters_of_llama_3_8b_are_those_that_peft_counts() -> None:
    """Hu et al., section 4.2: r (inner + columns) for each of 32 x 7 products of this model."""
    config = resolve_model("llama-3-8b")
    graph = trained_graph(config, [with_low_rank(16, 32.0)])
    assert graph.trained_parameters() == 41_943_040
    assert graph.parameters() == layer_graph(config).parameters() + 41_943_040
    some = trained_graph(config, [with_low_rank(8, 16.0, "q_proj", "v_proj")])
    assert some.trained_parameters() == 3_407_872


def test_a_table_without_keys_asks_for_rank_16_and_twice_its_scale() -> None:
    asked = parse_run({**MODEL, "cluster": {"use": "8xa100-80gb"}, "lora": {}})
    (choice,) = (one for one in problem_of_run(asked).job.methods if one.name == "lora")
    assert dict(choice.options) == {"rank": 16, "alpha": 32.0, "targets": ""}


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.5), ("int8", 8.5)])
def test_linear_layers_of_blocks_lie_in_few_bits_and_nothing_else(base: Base, bits: float) -> None:
    config = resolve_model("llama-3-8b")
    plain, packed = (trained_graph(config, [with_low_rank(16, base=one)]) for one in (None, base))
    linear = config.layers * sum(one.inner * one.columns for one in block_products(config))
    for degree in (1, 8):
        shape = Shape(1, 4096, degree)
        saved = [sum(layer.frozen_bytes(shape, 2) for layer in graph.layers) for graph in (plain, packed)]
        assert saved[0] - saved[1] == linear / degree * (16 - bits) / 8
    assert packed.parameters() == plain.parameters()
    assert packed.trained_parameters() == plain.trained_parameters()
    shape = Shape(1, 4096)
    unpacking = packed.layers[1].forward.memory(shape) - plain.layers[1].forward.memory(shape)
    assert unpacking > packed.layers[1].packed(shape)
    assert packed.layers[1].backward_weight == plain.layers[1].backward_weight
    # One weight is unpacked at a time.
    temporaries = [graph.layers[1].temporary_bytes(shape, 2, 4) for graph in (plain, packed)]
    assert temporaries[1] - temporaries[0] == 2 * 4096 * 14336


def test_tensor_ranks_divide_packed_weights_between_blocks() -> None:
    config = resolve_model("llama-3-8b")
    odd = replace(config, feed_forward=14336 + 32)
    packed, unlike, plain = (
        trained_graph(one, [with_low_rank(16, base=base)])
        for one, base in ((config, "nf4"), (odd, "nf4"), (odd, None))
    )
    assert packed.refuse_tensor(8) is None
    assert plain.refuse_tensor(2) is None
    assert unlike.refuse_tensor(1) is None
    assert str(unlike.refuse_tensor(2)) == "tp 2 does not divide 1 blocks of 64 of down_proj; nearest tp: 1"


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_other_ranks_scales_and_targets_are_other_models(family: str) -> None:
    config = tiny(family)
    name = block_products(config)[0].name
    asked = (
        *(with_low_rank(4, 8.0), with_low_rank(2, 8.0), with_low_rank(4, 4.0), with_low_rank(4, 8.0, name)),
        *(with_low_rank(base="nf4"), with_low_rank(base="int8"), with_low_rank(dropout=0.1)),
    )
    graphs = [trained_graph(config, [one]) for one in asked]
    assert len({one.fingerprint for one in (*graphs, layer_graph(config))}) == len(asked) + 1


@pytest.mark.parametrize("base", [None, "nf4"])
def test_frozen_layers_survive_a_file(base: Base | None) -> None:
    graph = trained_graph(tiny("llama"), [with_low_rank(base=base)])
    read = LayerGraph.from_json(graph.to_json())
    assert read == graph
    assert read.trained_parameters() < read.parameters()


def test_frozen_layers_keep_less_and_compute_less() -> None:
    for family in ("gpt", "llama"):
        plain = layer_graph(tiny(family))
        adapted = trained_graph(tiny(family), [with_low_rank(1)])
        assert not adapted.layers[0].backward_input.matmuls
        assert adapted.layers[0].frozen == plain.layers[0].parameters
        assert not adapted.layers[-1].backward_weight.matmuls
        assert len(adapted.layers[1].backward_weight.matmuls) == 2 * len(block_products(tiny(family)))


def test_a_target_that_no_block_of_a_mixture_has_is_refused() -> None:
    mixture = resolve_model("mixtral-1m")
    with pytest.raises(InputError, match=r"lora\.targets: 'down_proj' is not one of q_proj, .*, o_proj"):
        trained_graph(mixture, [with_low_rank(1, 2.0, "down_proj")])
    plain, adapted = layer_graph(mixture), trained_graph(mixture, [with_low_rank(1)])
    assert adapted.trained_parameters() == 4 * sum(one.inner + one.columns for one in block_products(mixture))
    assert adapted.parameters() == plain.parameters() + adapted.trained_parameters()


def test_a_target_that_is_no_linear_layer_is_told_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"lora\.targets: 'q_prj' is not one of q_proj, .*nearest.*q_proj"):
        trained_graph(tiny("llama"), [with_low_rank(4, 8.0, "q_prj", "v_proj")])


@pytest.mark.parametrize(
    "table", [{"rank": 0}, {"alpha": 0}, {"alpha": "high"}, {"ranks": 4}, {"base": "fp4"}]
)
def test_wrong_keys_are_told(table: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"lora"):
        parse_run({**MODEL, "lora": table})


def test_a_plan_and_its_job_freeze_the_same_layers() -> None:
    config = tiny("llama")
    graph = trained_graph(config, [with_low_rank()])
    plan = make_plan(config, precision="fp32", pp=2).model_copy(
        update={"model_fingerprint": graph.fingerprint, "cluster_fingerprint": CLUSTER.fingerprint}
    )
    assert any("the job has frozen layers" in str(one) for one in check_plan(plan, graph, CLUSTER))
    whole = plan.model_copy(update={"methods": (with_low_rank(),)})
    assert not list(check_plan(whole, graph, CLUSTER))
    dropping = whole.model_copy(update={"methods": (with_low_rank(dropout=0.1),)})
    assert not any("lora.dropout" in str(one) for one in check_plan(dropping, graph, CLUSTER))
    pieces = Choice(name="tensor-collectives", options={"run": "overlapped"})
    cut = dropping.model_copy(update={"methods": (*dropping.methods, pieces)})
    assert any("lora.dropout: layers that drop" in str(one) for one in check_plan(cut, graph, CLUSTER))
    sharded = whole.model_copy(update={"sharding": "zero-3"})
    assert any("frozen weights stay whole" in str(one) for one in check_plan(sharded, graph, CLUSTER))


def test_latent_attention_is_refused_in_one_line(tmp_path: Path) -> None:
    config = described(tmp_path, "deepseek_v3")
    with pytest.raises(InputError, match="linear layers are known of bert, gpt, vit"):
        trained_graph(config, [with_low_rank()])


@pytest.mark.parametrize("model", ["dlrm-tiny", "resnet-tiny", "vgg-tiny"])
def test_a_model_without_attention_is_refused_in_one_line(model: str) -> None:
    with pytest.raises(InputError, match="linear layers are known of bert, gpt, vit"):
        trained_graph(resolve_model(model), [with_low_rank()])


def test_one_a100_trains_low_rank_products_where_all_weights_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of docs/lora.md."""
    text = (
        'task.sequence = 4096\ntrain = { global_batch = 16, precision = "bf16" }\n'
        'model.preset = "llama-3-8b"\ncluster.use = "1xa100-80gb"\n'
    )
    for name, more in (
        ("all", ""),
        ("low-rank", "lora = { rank = 16 }\n"),
        ("packed", 'lora = { rank = 16, base = "nf4" }\n'),
    ):
        (tmp_path / f"{name}.toml").write_text(more + text)
    assert run(["plan", str(tmp_path / "all.toml")]) == 2
    assert "149 GB of states and buffers" in capsys.readouterr().err
    for name, rank, seconds, peak in (("low-rank", 1, "12.8", "48.8 GB"), ("packed", 2, "16.1", "38.5 GB")):
        assert run(["plan", str(tmp_path / f"{name}.toml"), "--all"]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown = next(line for line in lines if line.startswith(f" {rank} "))
        assert shown.split()[1:3] == [seconds, "s"]
        assert peak in shown
