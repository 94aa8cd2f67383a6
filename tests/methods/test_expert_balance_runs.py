"""Runs whose routers have biases: kept, and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from stopped_runs import saved, text_run, through_and_stopped

GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = """
[experts]
balance = "none"
bias_rate = 0.25
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_biases_of_routers_are_resumed_to_the_same_bits(tmp_path: Path, worker_pool: WorkerPool) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GLM))
    run = text_run(tmp_path, EXPERTS, steps=3, model='hf = "model"')
    whole, _ = through_and_stopped(worker_pool, tmp_path, run, steps=3, stop=2)
    [bias] = [one for name, one in saved(whole).items() if name.endswith("gate.e_score_correction_bias")]
    assert bias.any()
    # Each of three steps adds a quarter, takes one, or leaves an expert with as many tokens as the mean.
    assert ((bias * 4).round() / 4 == bias).all()
    assert bias.abs().max() <= 0.75
