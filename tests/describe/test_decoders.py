"""Decoders by their rows: what a `config.json` says is read, priced, or refused by name."""

import json
from dataclasses import asdict, replace

import pytest
from described_decoders import described
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Shape
from weft.describe.decoder_row import ROWS, TRAINED
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import model_from
from weft.describe.models import PRESETS, USUAL_SEQUENCE, resolve_model
from weft.describe.request import request_of_names
from weft.errors import InputError
from weft.run.supported import planned_only

SHAPE = Shape(2, 64)


def forward_flops(graph: LayerGraph) -> float:
    return sum(layer.forward.flops(SHAPE) for layer in graph.layers)


@pytest.mark.parametrize("model_type", ROWS)
def test_every_row_becomes_a_graph_that_survives_a_file(tmp_path, model_type):
    config = described(tmp_path, model_type)
    graph = layer_graph(config)
    assert [layer.kind for layer in graph.layers] == ["embedding", *["block"] * 4, "head"]
    assert LayerGraph.from_json(graph.to_json()) == graph
    assert model_from(json.loads(json.dumps(asdict(config)))) == config
    assert all(layer.kept(SHAPE) > 0 for layer in graph.layers[1:])


@pytest.mark.parametrize("model_type", ROWS)
def test_tensor_ranks_hold_every_parameter(tmp_path, model_type):
    graph = layer_graph(described(tmp_path, model_type))
    if graph.refuse_tensor(2) is None:
        assert graph.parameters() / 2 <= graph.parameters(2) < graph.parameters()


@pytest.mark.parametrize(("longest", "usual"), [(2048, 2048), (131072, USUAL_SEQUENCE)])
def test_samples_of_a_model_for_long_texts_have_a_usual_length(tmp_path, longest, usual):
    assert described(tmp_path, "llama", max_position_embeddings=longest).sequence == usual
    request = request_of_names(model=str(tmp_path), on="1xa100-80gb")
    assert request.assumed["sequence"].startswith(f"{usual} tokens")
    assert resolve_model(str(tmp_path), sequence=longest).sequence == longest


@pytest.mark.parametrize("name", ["llama-1m", "llama-7b", "llama-3-8b"])
def test_a_file_with_the_sizes_of_a_preset_is_that_model(tmp_path, name):
    preset = PRESETS[name]
    sizes = {
        "num_hidden_layers": preset.layers,
        "hidden_size": preset.hidden,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.key_value_heads,
        "intermediate_size": preset.feed_forward,
        "vocab_size": preset.vocabulary,
        "max_position_embeddings": preset.sequence,
        "tie_word_embeddings": preset.tied_embeddings,
    }
    described(tmp_path, "llama", **sizes)
    config = resolve_model(str(tmp_path), sequence=preset.sequence)
    assert replace(layer_graph(config), name=name).to_json() == layer_graph(preset).to_json()


def test_presets_have_the_fingerprints_of_plans_made_before_the_table():
    known = {
        "llama-1m": "7693d1d953614a4d",
        "llama-7b": "c1e622c4b2c77369",
        "llama-3-70b": "7734ec539b9e39db",
        "gpt2": "9e361536f227d610",
    }
    assert {name: layer_graph(PRESETS[name]).fingerprint for name in known} == known


@given(st.integers(1, 4), st.integers(4, 9))
def test_a_mixture_computes_active_experts_and_holds_all(tmp_path_factory, active, count):
    folder = tmp_path_factory.mktemp("mixture")

    def graph(active: int, count: int) -> LayerGraph:
        keys = {"num_experts_per_tok": active, "num_local_experts": count}
        return layer_graph(described(folder, "mixtral", **keys))

    router = 32
    expert = 3 * 32 * 48
    here, more = graph(active, count), graph(active, count + 1)
    assert more.parameters() - here.parameters() == 4 * (expert + router)
    # Only the router multiplies with all experts.
    assert forward_flops(more) - forward_flops(here) == 4 * 2 * 128 * router
    if active < count:
        assert forward_flops(graph(active + 1, count)) - forward_flops(here) == 4 * 2 * 128 * expert


def test_blocks_without_experts_are_where_the_file_says(tmp_path):
    def blocks(model_type: str, **keys: object) -> list[float]:
        layers = layer_graph(described(tmp_path, model_type, **keys)).layers[1:-1]
        return [layer.parameters(SHAPE) for layer in layers]

    dense, *mixed = blocks("deepseek_v3", first_k_dense_replace=1)
    assert len(set(mixed)) == 1
    assert dense < mixed[0]
    assert blocks("qwen3_moe", mlp_only_layers=[0]) != blocks("qwen3_moe")
    first, second, *_ = blocks("qwen3_moe", decoder_sparse_step=2)
    assert first < second
    kinds = ["dense", "sparse", "dense", "sparse"]
    listed = blocks("deepseek_v3", mlp_layer_types=kinds)
    assert [one == dense for one in listed] == [kind == "dense" for kind in kinds]


@pytest.mark.parametrize(
    ("model_type", "keys", "windows"),
    [
        ("mistral", {"sliding_window": 16}, (16, 16, 16, 16)),
        ("mistral", {"sliding_window": None}, ()),
        ("qwen2", {"sliding_window": 16}, ()),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 16)),
        ("gemma2", {"sliding_window": 16}, (16, 0, 16, 0)),
        ("olmo3", {"sliding_window": 16}, (16, 16, 16, 0)),
        ("cwm", {"sliding_window": 16}, (0, 16, 16, 16)),
        ("gemma2", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_windows_are_those_of_transformers(tmp_path, model_type, keys, windows):
    config = described(tmp_path, model_type, **keys)
    assert config.decoder is not None
    assert config.decoder.windows == windows


def test_a_window_saves_scores_and_no_window_changes_nothing(tmp_path):
    whole, narrow, wide = (
        forward_flops(layer_graph(described(tmp_path, "mistral", sliding_window=window)))
        for window in (None, 8, 64)
    )
    assert narrow < whole == wide


def test_context_ranks_are_refused_where_attention_has_windows(tmp_path):
    assert layer_graph(described(tmp_path, "mistral", sliding_window=None)).refuse_context(2, 64) is None
    assert layer_graph(described(tmp_path, "mistral", sliding_window=8)).refuse_context(2, 64) is not None


@pytest.mark.parametrize(
    ("model_type", "keys", "blocks"),
    [
        ("qwen3_next", {}, (0, 1, 2)),
        ("qwen3_next", {"full_attention_interval": 2}, (0, 2)),
        ("qwen3_5_text", {"layer_types": ["linear_attention", *["full_attention"] * 3]}, (0,)),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2, 3]}}, (0, 3)),
        ("lara_mini", {}, (0, 2)),
        ("minimax", {}, (1, 3)),
    ],
)
def test_blocks_have_linear_attention_where_the_file_says(tmp_path, model_type, keys, blocks):
    config = described(tmp_path, model_type, **keys)
    assert config.decoder is not None
    assert config.decoder.linear.blocks == blocks


@pytest.mark.parametrize(
    ("model_type", "keys", "heads"),
    [
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 8, 4, 4]},
            [(4, 2, 8), (8, 2, 8), (4, 2, 8), (4, 2, 8)],
        ),
        ("laguna", {"num_attention_heads_per_layer": [4] * 4}, []),
        ("gemma4_unified_text", {"global_head_dim": 16}, [*[(4, 2, 8)] * 3, (4, 2, 16)]),
        (
            "gemma4_unified_text",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            [*[(4, 2, 8)] * 3, (4, 1, 512)],
        ),
        (
            "gemma4_unified_text",
            {"per_layer_config": {"01": {"head_dim": 4}}},
            [(4, 2, 8), (4, 2, 4), *[(4, 2, 8)] * 2],
        ),
    ],
)
def test_blocks_have_the_heads_that_the_file_says(tmp_path, model_type, keys, heads):
    config = described(tmp_path, model_type, head_dim=8, **keys)
    assert config.decoder is not None
    found = [(one.heads, one.key_value_heads, one.head_size) for one in config.decoder.block_sizes]
    assert found == heads
    assert layer_graph(config).refuse_tensor(2) is not None


def test_a_nested_key_comes_before_its_default(tmp_path):
    config = described(tmp_path, "kimi_linear", linear_attn_config={"num_heads": 3, "head_dim": 5})
    assert (config.decoder.linear.key_heads, config.decoder.linear.value_size) == (3, 5)


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "minimax"])
def test_linear_attention_grows_with_the_tokens_and_other_attention_with_their_square(tmp_path, model_type):
    config = described(tmp_path, model_type)

    def of_blocks(sequence: int) -> list[tuple[float, float]]:
        graph = layer_graph(replace(config, sequence=sequence))
        shape = Shape(1, sequence)
        return [(one.flops(shape), one.kept_bytes(shape)) for one in graph.layers[1:-1]]

    for index, (short, long) in enumerate(zip(of_blocks(1024), of_blocks(2048), strict=True)):
        linear = config.decoder.linear_in(index) is not None
        assert (long[0] == pytest.approx(2 * short[0])) == linear
        assert long[1] == pytest.approx(2 * short[1])


@pytest.mark.parametrize(
    ("model_type", "keys"), [("qwen3_next", {}), ("olmo3", {"sliding_window": 8}), ("minimax", {})]
)
def test_context_ranks_divide_the_tokens_of_all_blocks_or_of_none(tmp_path, model_type, keys):
    graph = layer_graph(described(tmp_path, model_type, **keys))
    assert graph.refuse_context(2, 64) is not None


def test_a_key_that_is_null_is_not_the_default_of_an_absent_key(tmp_path):
    direct = described(tmp_path, "deepseek_v3", q_lora_rank=None).decoder
    absent = described(tmp_path, "deepseek_v3").decoder
    assert direct is not None
    assert absent is not None
    assert (direct.latent.query_rank, absent.latent.query_rank) == (0, 1536)


def test_an_unknown_type_is_asked_for_its_keys_in_one_line(tmp_path):
    with pytest.raises(InputError) as refused:
        described(tmp_path, "mistralish")
    [violation] = refused.value.violations
    assert violation.nearest == ""
    assert all(key in str(violation) for key in ("weft_decoder", "norm", "gated", "query_key_norm"))
    assert not any(name in str(violation).replace("mistralish", "") for name in ROWS)


def test_a_type_with_a_known_text_model_is_told_how_to_plan_the_text(tmp_path):
    with pytest.raises(InputError, match=r"parts beside its text.* text_config \(gemma3_text\)"):
        described(tmp_path, "gemma3", text_config={"model_type": "gemma3_text"})
    with pytest.raises(InputError, match="weft_decoder"):
        described(tmp_path, "gemma3", text_config={"model_type": "mistralish"})


def test_an_unknown_type_with_its_keys_is_planned_like_the_row_with_the_same(tmp_path):
    stated = {
        "norm": "rms",
        "placement": "before",
        "gated": True,
        "query_bias": False,
        "output_bias": False,
        "feed_forward_bias": False,
        "query_key_norm": "none",
    }
    own = described(tmp_path, "mine", weft_decoder=stated)
    assert layer_graph(own).to_json() == layer_graph(described(tmp_path, "llama")).to_json()
    assert len(planned_only(own)) == 1
    with pytest.raises(InputError, match="nearest valid: gated"):
        described(tmp_path, "mine", weft_decoder={**stated, "gatd": True})


@pytest.mark.parametrize(
    ("model_type", "keys", "place"),
    [
        ("falcon", {"alibi": True}, "alibi"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ],
)
def test_what_a_row_does_not_describe_is_refused(tmp_path, model_type, keys, place):
    with pytest.raises(InputError) as refused:
        described(tmp_path, model_type, **keys)
    assert [violation.where.rpartition(" ")[2] for violation in refused.value.violations] == [place]


@pytest.mark.parametrize(
    ("keys", "blocks"),
    [
        ({}, (0, 1, 2, 3)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (0, 2)),
    ],
)
def test_blocks_that_share_a_choice_of_tokens_are_planned_only(tmp_path, keys, blocks):
    config = described(tmp_path, "glm_moe_dsa", **keys)
    assert config.decoder is not None
    assert config.decoder.indexer.blocks == blocks
    whole, own = layer_graph(described(tmp_path, "glm_moe_dsa")), layer_graph(config)
    # Queries from the latent vector, a key and its norm, and weights of heads.
    of_one = 2048 * 32 * 128 + 32 * 128 + 2 * 128 + 32 * 32
    assert whole.parameters() - own.parameters() == of_one * (4 - len(blocks))
    assert bool(planned_only(config)) == (len(blocks) < 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "rows of a table beside the stream"),
        ({"num_kv_shared_layers": 1}, "rows of a table beside the stream"),
        ({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1}, "without keys of their own"),
        (
            {
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 1,
            },
            "beside a plain feed-forward",
        ),
    ],
)
def test_blocks_that_read_more_than_the_stream_are_planned_only(tmp_path, keys, words):
    [violation] = planned_only(described(tmp_path, "gemma4_text", **keys))
    assert words in str(violation)


def test_stages_hand_on_what_later_blocks_read(tmp_path):
    def sent(**keys: object) -> list[float]:
        graph = layer_graph(described(tmp_path, "gemma4_text", head_dim=8, **keys))
        return [layer.sent(Shape(1, 1)) for layer in graph.layers]

    none = sent(hidden_size_per_layer_input=0)
    assert none == [32.0] * 5 + none[5:]
    inputs = sent(hidden_size_per_layer_input=6)
    assert [one - other for one, other in zip(inputs, none, strict=True)] == [24, 18, 12, 6, 0, 0]
    # The second block stores keys and values of windows and the third of all tokens, for the last two.
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    keys = sent(hidden_size_per_layer_input=0, num_kv_shared_layers=1, layer_types=kinds)
    assert [one - other for one, other in zip(keys, none, strict=True)] == [
        0,
        0,
        2 * 16,
        2 * 16 + 2 * 1024,
        0,
        0,
    ]


def test_rows_that_are_not_trained_say_so(tmp_path):
    for model_type in ROWS:
        # One type is trained without inputs of blocks alone.
        config = described(tmp_path, model_type, hidden_size_per_layer_input=0)
        assert bool(planned_only(config)) == (model_type not in TRAINED)
    [violation] = planned_only(described(tmp_path, "phimoe"))
    assert "phimoe is planned only" in str(violation)
