"""Runs with biases of routers, or experts that move: resumed, and ended, with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from described_decoders import described
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved, text_run, through_and_stopped

from weft.training.directory.run_directory import RunDirectory

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


# Wide experts: two ranks compute long enough for a move to pay.
WIDE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "num_local_experts": 8}
MOVING = """
[model]
hf = "model"
[task]
data = "text.txt"
sequence = 128
[train]
global_batch = 8
steps = {steps}
precision = "fp32"
[plan]
ep = 2
micro_batch_size = 4
schedule = "gpipe"
[experts]
balance = "none"
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_experts_of_a_run_move_and_change_none_of_its_bits(tmp_path: Path, worker_pool: WorkerPool) -> None:
    (tmp_path / "model").mkdir()
    described(tmp_path / "model", "mixtral", vocab_size=256, max_position_embeddings=128, **WIDE)
    # Few words: the tokens choose few experts.
    (tmp_path / "text.txt").write_text("The sheep of the hills are counted twice. " * 1000)
    staying, moving = (tmp_path / f"{name}.toml" for name in ("staying", "moving"))
    staying.write_text(MOVING.format(steps=6))
    moving.write_text(MOVING.format(steps=6) + "move_every = 2\n")
    trained(worker_pool, staying, directory=tmp_path / "stayed", steps=6)
    trained(worker_pool, moving, directory=tmp_path / "moved", steps=4)
    # A resumed run has all experts in their first places.
    trained(worker_pool, moving, resume=tmp_path / "moved", steps=6)
    expected, found = (saved(tmp_path / name) for name in ("stayed", "moved"))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    events = [one for one in RunDirectory(tmp_path / "moved").events() if one["event"] == "experts moved"]
    assert events
    for one in events:
        assert one["step"] in (2, 4)
        assert one["busiest_after"] < one["busiest"]
        assert 2 * one["saved_s"] > one["move_s"] > 0
        assert one["moved_bytes"] == 2 * one["swaps"] * 3 * 64 * 512 * 12
