"""Configurations of `transformers` for rows of the table of decoders, and the parameters of their models."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.models import CONFIG_FILE, read_config

# Sizes of tiny models, for those of these keys that a type has.
_SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 5),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "model_max_length"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "head_dim": 24,
    "vocab_size": 128,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "index_n_heads": 3,
    "index_head_dim": 10,
    "index_topk": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 16}
# Keys with one entry per layer, or that follow from sizes.
_DERIVED = (
    "layer_types",
    "indexer_types",
    "per_layer_config",
    "num_attention_heads_per_layer",
    "mlp_layer_types",
    "layer_rope_theta",
    "rope_parameters",
    "qk_head_dim",
)
# Choices of architecture, which a second tiny model makes the other way.
_SWITCHES = (
    *("attention_bias", "mlp_bias", "use_bias", "bias", "use_qkv_bias", "qkv_bias", "enable_bias"),
    *("lm_head_bias", "use_qk_norm", "use_parallel_residual", "new_decoder_architecture"),
    *("tie_word_embeddings", "attention_k_eq_v"),
)
# Values without which the defaults of a type make no model, or none whose heads divide its width.
_COMPLETED = {
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
# Values without which a tiny model cannot be made, as above.
_TINY: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    # Its heads have the width of the model together.
    "helium": {"head_dim": 16},
    "laguna": {
        "num_attention_heads_per_layer": [4, 6, 4, 8, 4],
        "layer_types": [*["full_attention", "sliding_attention"] * 2, "sliding_attention"],
    },
    "gemma4_unified_text": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "gemma4_text": {
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 0,
    },
    # Unsupported choices.
    "minimax": {"sliding_window": None},
    "kimi_linear": {"tie_word_embeddings": False},
    "bailing_hybrid": {"tie_word_embeddings": False},
}


def default_config(model_type: str) -> PreTrainedConfig:
    """The configuration with the defaults of its class."""
    return _config(model_type, _COMPLETED.get(model_type, {}))


def tiny_config(model_type: str, *, switched: bool = False, **more: Any) -> PreTrainedConfig:
    """A tiny model; `switched`: with other choices of architecture, and `more` keys."""
    given = _config(model_type, {}).to_dict()
    latent = "qk_rope_head_dim" in given
    dropped = (*_DERIVED, "head_dim") if latent else _DERIVED
    keys = {key: value for key, value in given.items() if key not in dropped}
    keys |= {key: size for key, size in _SIZES.items() if key in keys}
    if latent:
        # Every head has its own keys and values.
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    if given.get("sliding_window") or (switched and "sliding_window" in given):
        keys |= _WINDOW
    if switched:
        keys |= {key: not keys[key] for key in _SWITCHES if key in keys}
        keys |= {"q_lora_rank": None} if latent and "index_topk" not in given else {}
    return _config(model_type, keys | _TINY.get(model_type, {}) | more)


def counted(config: PreTrainedConfig) -> tuple[list[int], list[int]]:
    """The parameters that weft counts for a configuration, and those of the model of `transformers`.

    Both are of the whole model, then of each block.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG_FILE
        config.to_json_file(path)
        graph = layer_graph(read_config(path))
    shape = Shape(1, graph.sequence)
    ours = [graph.parameters(), *(round(block.parameters(shape)) for block in graph.layers[1:-1])]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # The list of blocks has another name in some types.
    blocks = next(one for one in model.modules() if isinstance(one, nn.ModuleList))
    return ours, [sum(one.numel() for one in part.parameters()) for part in (model, *blocks)]


def _config(model_type: str, keys: Mapping[str, Any]) -> PreTrainedConfig:
    known = {key: value for key, value in keys.items() if key not in ("model_type", "transformers_version")}
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**known)
    return config
