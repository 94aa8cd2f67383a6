"""Llama checkpoints of torchtitan, with the names and the row order of `transformers`.

Both programs rotate pairs of a head's values by the position. In torchtitan a pair consists of neighbours
(Su et al., arXiv 2104.09864, equation 15). In `transformers` a pair is half a head apart. So the rows of the
query and key projections have another order. Names and order follow its `Llama3StateDictAdapter`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from weft.describe.model import ModelConfig
from weft.training.checkpoint.tensor_folders import Shape, TensorFolder

TOKEN_TABLE = "tok_embeddings.weight"
_OUTSIDE = {
    TOKEN_TABLE: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "output.weight": "lm_head.weight",
}
_QUERIES, _KEYS = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": _QUERIES,
    "attention.wk.weight": _KEYS,
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class TorchtitanLlama:
    """The tensors of a torchtitan Llama under the names of `transformers`; other entries keep their names."""

    def __init__(self, folder: TensorFolder, config: ModelConfig) -> None:
        self.path = folder.path
        self._folder = folder
        self._names = {_renamed(name): name for name in folder.shapes}
        self._heads = {_QUERIES: config.heads, _KEYS: config.key_value_heads}
        self.shapes: Mapping[str, Shape] = {
            name: folder.shapes[stored] for name, stored in self._names.items()
        }

    def read(self, name: str) -> torch.Tensor:
        value = self._folder.read(self._names[name])
        heads = next((heads for end, heads in self._heads.items() if name.endswith(end)), 0)
        return halves_from_neighbours(value, heads) if heads else value


def halves_from_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder a projection (heads * head size, hidden) with neighbour pairs to pairs half a head apart."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _renamed(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        # Newer versions keep the three projections in a separate module.
        part = match[2].replace("attention.qkv_linear.", "attention.")
        return f"model.layers.{match[1]}.{_IN_LAYER[part]}" if part in _IN_LAYER else name
    return _OUTSIDE.get(name, name)
