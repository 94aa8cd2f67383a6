"""Stages of Llama, made from the blocks of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch, plain_branch
from weft.run.stage.stage_module import Initial, StageModule
from weft.run.stage.submodules import Submodules, weight_of


def llama_config(config: ModelConfig) -> LlamaConfig:
    """Return the `transformers` configuration of a model, with fused attention."""
    return LlamaConfig(  # type: ignore[call-arg]  # keys of all families are not among its types
        vocab_size=config.vocabulary,
        max_position_embeddings=config.sequence,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        intermediate_size=config.feed_forward,
        rms_norm_eps=1e-6 if config.norm_epsilon is None else config.norm_epsilon,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4 if config.rotary_base is None else config.rotary_base,
        },
        tie_word_embeddings=config.tied_embeddings,
        # The family's default ids lie outside small vocabularies, and nothing here generates.
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


class _Model(nn.Module):
    """A stage's part of `model`."""

    embed_tokens: nn.Embedding
    layers: Submodules[LlamaDecoderLayer]
    rotary_emb: LlamaRotaryEmbedding
    norm: LlamaRMSNorm


class LlamaStage(StageModule):
    """Every stage computes the rotary angles itself; without an attention mask the blocks attend causally."""

    token_table = "model.embed_tokens"
    held: ClassVar[Mapping[str, HeldByTensorRanks]] = {
        "q_proj.weight": HeldByTensorRanks(axis=0),
        "k_proj.weight": HeldByTensorRanks(axis=0),
        "v_proj.weight": HeldByTensorRanks(axis=0),
        "o_proj.weight": HeldByTensorRanks(axis=1),
        "gate_proj.weight": HeldByTensorRanks(axis=0),
        "up_proj.weight": HeldByTensorRanks(axis=0),
        "down_proj.weight": HeldByTensorRanks(axis=1),
        "embed_tokens.weight": HeldByTensorRanks(axis=0),
        "lm_head.weight": HeldByTensorRanks(axis=0),
    }
    regions = ("self_attn", "mlp")
    row_products = ("self_attn.o_proj", "mlp.down_proj")

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        hugging_face = llama_config(config)
        self.initializer_range = hugging_face.initializer_range
        self.model = _Model()
        if self.has_table:
            self.model.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.model.layers = Submodules(
            {str(index): LlamaDecoderLayer(hugging_face, layer_idx=index) for index in self.block_indices}
        )
        # The angles are a buffer: `materialise` gives it no values, so it skips the meta device.
        with torch.device("cpu"):
            self.model.rotary_emb = LlamaRotaryEmbedding(hugging_face)
        if self.ends:
            self.model.norm = LlamaRMSNorm(config.hidden, eps=hugging_face.rms_norm_eps)
            if not config.tied_embeddings:
                self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model.layers.values())

    def initial(self, name: str) -> Initial:
        return Initial(mean=1.0) if "norm" in name else Initial(deviation=self.initializer_range)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from tokens (b, s) or states (b, s, hidden) to states or logits (b, s,
        vocabulary)."""
        functions: list[LayerFunction] = [self._embed] if self.embeds else []
        if self.block_indices:
            angles = self._angles(inputs)
            functions += [partial(block, position_embeddings=angles) for block in self.model.layers.values()]
        return [*functions, self._head] if self.ends else functions

    def branches(self, inputs: torch.Tensor) -> Iterator[Branch]:
        angles = self._angles(inputs) if self.block_indices else None
        for block in self.model.layers.values():
            attention = partial(_attend, block.self_attn, angles)
            yield plain_branch(block.input_layernorm, attention, block.self_attn.o_proj, block.self_attn)
            yield plain_branch(block.post_attention_layernorm, block.mlp, block.mlp.down_proj, block.mlp)

    def last_norm(self, stream: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.model.norm(stream)
        return normed

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        head = self.model.embed_tokens if self.config.tied_embeddings else self.lm_head
        return (weight_of(head),)

    def multiply_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden, self.head_weights[0])

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(self.look_up(tokens), tokens)

    def _angles(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, each (1, tokens, head size), for all the stage's blocks."""
        # Tensor ranks compute all keys, even if the stage's input has only this rank's tokens.
        divided = (self.tensor.size if self.tensor.divides_sequence else 1) * self.context.size
        tokens = inputs.shape[1] * (1 if self.embeds else divided)
        positions = torch.arange(tokens, device=inputs.device).unsqueeze(0)
        positions = self.context.own_tokens(positions)
        # The module takes the device and precision of its result from its first argument.
        like = next(self.model.layers.parameters())
        cosines, sines = self.model.rotary_emb(like, position_ids=positions)
        return cosines, sines

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.multiply_out(self.last_norm(hidden))


def _attend(
    attention: LlamaAttention, angles: tuple[torch.Tensor, torch.Tensor] | None, hidden: torch.Tensor
) -> torch.Tensor:
    output: torch.Tensor = attention(hidden_states=hidden, position_embeddings=angles, attention_mask=None)[0]
    return output
