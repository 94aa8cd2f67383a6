"""Small decoders that only a `config.json` describes, for tests without torch."""

from __future__ import annotations

import json
from pathlib import Path

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model

# The sizes that the rows read, under the names of all of them.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "model_max_length"), 64),
    "vocab_size": 50,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}


def described(folder: Path, model_type: str, **keys: object) -> ModelConfig:
    """Write a model's description to the folder, and read it."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **keys}))
    return resolve_model(str(folder))
