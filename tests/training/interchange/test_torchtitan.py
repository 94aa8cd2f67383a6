"""Llama checkpoints in torchtitan's names: the same attention scores, and the same logits, once imported."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hugging_face_jobs import inputs_of, model_folder, small, transformers_logits, whole_model
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from weft.training.interchange.imports import halves_from_neighbours, import_weights

NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
OLDER = {"attention.qkv_linear.": "attention.", "lm_head.": "output."}


def rotate_neighbours(values: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Complex multiplication of neighbouring pairs, (heads, positions, size) by (positions, size / 2)."""
    pairs = torch.view_as_complex(values.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@given(heads=st.integers(1, 4), half=st.integers(1, 5), positions=st.integers(1, 6), seed=st.integers(0, 999))
def test_attention_scores_do_not_change(heads: int, half: int, positions: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width = heads * 2 * half, 7
    queries, keys, inputs = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, width), (rows, width), (positions, width))
    )
    angles = torch.outer(torch.arange(positions).double(), torch.rand(half, generator=generator).double())

    def split(weight: torch.Tensor) -> torch.Tensor:
        return (inputs @ weight.T).reshape(positions, heads, 2 * half).transpose(0, 1).contiguous()

    theirs = rotate_neighbours(split(queries), angles) @ rotate_neighbours(split(keys), angles).mT
    doubled = torch.cat((angles, angles), dim=-1)
    ours = apply_rotary_pos_emb(
        split(halves_from_neighbours(queries, heads)).unsqueeze(0),
        split(halves_from_neighbours(keys, heads)).unsqueeze(0),
        doubled.cos().unsqueeze(0),
        doubled.sin().unsqueeze(0),
    )
    torch.testing.assert_close(ours[0][0] @ ours[1][0].mT, theirs, rtol=1e-10, atol=1e-10)


def neighbours_from_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


@pytest.mark.parametrize("older", [False, True])
def test_a_checkpoint_of_torchtitan_becomes_the_model(tmp_path: Path, older: bool) -> None:
    config = small("llama")
    heads = {"q_proj": config.heads, "k_proj": config.key_value_heads}
    tensors = {}
    for name, value in whole_model(config).state_dict().items():
        part = next((count for word, count in heads.items() if word in name), 0)
        stored = name
        for ours, theirs in {**NAMES, **(OLDER if older else {})}.items():
            stored = stored.replace(ours, theirs)
        tensors[stored] = neighbours_from_halves(value, part) if part else value
    dcp.save({**tensors, "train_state": 3}, checkpoint_id=tmp_path / "checkpoint" / "step-10", no_dist=True)
    shape = model_folder(tmp_path / "shape", config)
    written, left_out = import_weights(tmp_path / "checkpoint", tmp_path / "out", str(shape))
    assert (written.tensors, left_out) == (len(tensors), 1)
    ours = whole_model(config)(inputs_of(config)).detach()
    assert torch.equal(ours, transformers_logits(tmp_path / "out", config, torch.float32))
