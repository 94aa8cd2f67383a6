"""Rows of the table of decoders have the parameters of `transformers`; `make bench` counts all rows."""

import pytest
from decoder_files import counted, tiny_config

ROWS = (
    *("mistral", "gpt_neox", "cohere", "qwen2_moe", "qwen3_next"),
    *("olmo_hybrid", "gemma4_unified_text", "deepseek_v32"),
)


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size_per_layer_input": 8},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_parameters_beside_the_stream_equal_those_of_transformers(keys: dict[str, int]) -> None:
    ours, theirs = counted(tiny_config("gemma4_text", num_hidden_layers=8, **keys))
    assert ours == theirs


@pytest.mark.parametrize("switched", [False, True], ids=["tiny", "switched"])
@pytest.mark.parametrize("model_type", ROWS)
def test_parameters_equal_those_of_transformers(model_type: str, switched: bool) -> None:
    ours, theirs = counted(tiny_config(model_type, switched=switched))
    assert ours == theirs
