"""Rows of the table of decoders have the parameters of `transformers`; `make bench` counts all rows."""

import pytest
from decoder_files import counted, tiny_config

ROWS = (
    *("mistral", "gpt_neox", "cohere", "qwen2_moe", "qwen3_next"),
    *("olmo_hybrid", "gemma4_unified_text", "deepseek_v32"),
)


@pytest.mark.parametrize("switched", [False, True], ids=["tiny", "switched"])
@pytest.mark.parametrize("model_type", ROWS)
def test_parameters_equal_those_of_transformers(model_type: str, switched: bool) -> None:
    ours, theirs = counted(tiny_config(model_type, switched=switched))
    assert ours == theirs
