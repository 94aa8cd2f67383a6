"""Stages of GPT-2, made from the blocks of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.documents import Documents
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch, plain_branch
from weft.run.stage.stage_module import Initial, StageModule
from weft.run.stage.submodules import Submodules, weight_of


def gpt_config(config: ModelConfig) -> GPT2Config:
    """Return the `transformers` configuration of a model, without dropout and with fused attention."""
    return GPT2Config(  # type: ignore[call-arg]  # keys of all families are not among its types
        vocab_size=config.vocabulary,
        n_positions=config.sequence,
        n_embd=config.hidden,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=config.feed_forward,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5 if config.norm_epsilon is None else config.norm_epsilon,
        tie_word_embeddings=config.tied_embeddings,
        # The family's default ids lie outside small vocabularies, and nothing here generates.
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        # The family's gelu_new in one kernel, which keeps only its input for the backward pass.
        activation_function="gelu_pytorch_tanh",
    )


class _Transformer(nn.Module):
    """A stage's part of `transformer`."""

    wte: nn.Embedding
    wpe: nn.Embedding
    h: Submodules[GPT2Block]
    ln_f: nn.LayerNorm


class GptStage(StageModule):
    """Without an attention mask the blocks attend causally."""

    token_table = "transformer.wte"
    # `transformers` keeps these products' weights as (inner, columns).
    held = MappingProxyType(
        {
            "attn.c_attn.weight": HeldByTensorRanks(axis=1, blocks=3),
            "attn.c_attn.bias": HeldByTensorRanks(axis=0, blocks=3),
            "attn.c_proj.weight": HeldByTensorRanks(axis=0),
            "mlp.c_fc.weight": HeldByTensorRanks(axis=1),
            "mlp.c_fc.bias": HeldByTensorRanks(axis=0),
            "mlp.c_proj.weight": HeldByTensorRanks(axis=0),
            "wte.weight": HeldByTensorRanks(axis=0),
            "lm_head.weight": HeldByTensorRanks(axis=0),
        }
    )
    regions = ("attn", "mlp")
    region_ends = ("attn.c_proj", "mlp.c_proj")

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        hugging_face = gpt_config(config)
        self.initializer_range = hugging_face.initializer_range
        self.transformer = _Transformer()
        if self.has_table:
            self.transformer.wte = nn.Embedding(config.vocabulary, config.hidden)
        if self.embeds:
            self.transformer.wpe = nn.Embedding(config.sequence, config.hidden)
        self.transformer.h = Submodules(
            {str(index): GPT2Block(hugging_face, layer_idx=index) for index in self.block_indices}
        )
        if self.ends:
            self.transformer.ln_f = nn.LayerNorm(config.hidden, eps=hugging_face.layer_norm_epsilon)
            if not config.tied_embeddings:
                self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.transformer.h.values())

    def narrow(self, block: nn.Module, size: int) -> None:
        assert isinstance(block, GPT2Block)
        attention, feed_forward = block.attn, block.mlp
        attention.split_size //= size
        attention.c_attn.nf //= size
        feed_forward.c_fc.nf //= size

    def initial(self, name: str) -> Initial:
        if ".ln_" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        if name.endswith("bias"):
            return Initial()
        if name.endswith("c_proj.weight"):
            # Two residual branches per block (Radford et al. 2019, section 2.3).
            return Initial(deviation=self.initializer_range / math.sqrt(2 * self.config.layers))
        return Initial(deviation=self.initializer_range)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from tokens (b, s) or states (b, s, hidden) to states or logits (b, s,
        vocabulary)."""
        # What a recomputed pass needs, too: by then the stage has the documents of another micro-batch.
        documents = self.documents
        functions: list[LayerFunction] = [partial(self._embed, documents=documents)] if self.embeds else []
        functions += [partial(block, attention_mask=documents) for block in self.blocks]
        return [*functions, self._head] if self.ends else functions

    def branches(self, inputs: torch.Tensor) -> Iterator[Branch]:
        for block in self.transformer.h.values():
            attend = partial(_attend, block.attn, self.documents)
            yield plain_branch(block.ln_1, attend, block.attn.c_proj)
            yield plain_branch(block.ln_2, block.mlp, block.mlp.c_proj)

    def embed(
        self, rows: torch.Tensor, tokens: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        every = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        positions = every if documents is None else documents.positions
        embedded: torch.Tensor = rows + self.transformer.wpe(self.own_tokens(positions))
        return embedded

    def last_norm(self, stream: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.transformer.ln_f(stream)
        return normed

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        head = self.transformer.wte if self.config.tied_embeddings else self.lm_head
        return (weight_of(head),)

    def multiply_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden, self.head_weights[0])

    def _embed(self, tokens: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        return self.embed(self.look_up(tokens), tokens, documents)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.multiply_out(self.last_norm(hidden))


def _attend(attention: nn.Module, documents: Documents | None, hidden: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = attention(hidden, attention_mask=documents)[0]
    return output
