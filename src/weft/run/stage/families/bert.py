"""Stages of BERT with its head for masked tokens, made from the layers of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertEmbeddings,
    BertLayer,
    BertOutput,
    BertPredictionHeadTransform,
    BertSelfOutput,
)

from weft.describe.families.bert import SEGMENTS
from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_layers import HeldByTensorRanks, finish
from weft.run.stage.documents import Documents
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch
from weft.run.stage.stage_module import Initial, StageModule
from weft.run.stage.submodules import Submodules, weight_of


def bert_config(config: ModelConfig) -> BertConfig:
    """Return the `transformers` configuration of a model, without dropout and with fused attention."""
    return BertConfig(  # type: ignore[call-arg]  # keys of all families are not among its types
        vocab_size=config.vocabulary,
        max_position_embeddings=config.sequence,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        type_vocab_size=SEGMENTS,
        layer_norm_eps=1e-12 if config.norm_epsilon is None else config.norm_epsilon,
        tie_word_embeddings=config.tied_embeddings,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # Samples are whole windows: no token is padding, and a padding token would never be trained.
        pad_token_id=None,
        attn_implementation="sdpa",
    )


class _TokenTable(nn.Module):
    """The part of `bert.embeddings` in a stage with the head alone."""

    word_embeddings: nn.Embedding


class _BertEncoder(nn.Module):
    """A stage's part of `bert.encoder`."""

    layer: Submodules[BertLayer]


class _Bert(nn.Module):
    """A stage's part of `bert`."""

    embeddings: BertEmbeddings | _TokenTable
    encoder: _BertEncoder


class _Predictions(nn.Module):
    """A stage's part of `cls.predictions`; a tied head has a `bias`, any other a `decoder`."""

    transform: BertPredictionHeadTransform
    bias: nn.Parameter
    decoder: nn.Linear


class _Head(nn.Module):
    """A stage's part of `cls`."""

    predictions: _Predictions


class BertStage(StageModule):
    """Every token attends to all tokens of its sample; all of them are of the first segment."""

    token_table = "bert.embeddings.word_embeddings"
    held = MappingProxyType(
        {
            "attention.self.query.weight": HeldByTensorRanks(axis=0),
            "attention.self.query.bias": HeldByTensorRanks(axis=0),
            "attention.self.key.weight": HeldByTensorRanks(axis=0),
            "attention.self.key.bias": HeldByTensorRanks(axis=0),
            "attention.self.value.weight": HeldByTensorRanks(axis=0),
            "attention.self.value.bias": HeldByTensorRanks(axis=0),
            "output.dense.weight": HeldByTensorRanks(axis=1),
            "intermediate.dense.weight": HeldByTensorRanks(axis=0),
            "intermediate.dense.bias": HeldByTensorRanks(axis=0),
            "word_embeddings.weight": HeldByTensorRanks(axis=0),
            "predictions.bias": HeldByTensorRanks(axis=0),
            "predictions.decoder.weight": HeldByTensorRanks(axis=0),
            "predictions.decoder.bias": HeldByTensorRanks(axis=0),
        }
    )
    regions = ("attention.self", "intermediate")
    region_ends = ("attention.output.dense", "output.dense")

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        hugging_face = bert_config(config)
        self.initializer_range = hugging_face.initializer_range
        self.bert = _Bert()
        if self.embeds:
            embeddings = BertEmbeddings(hugging_face)
            self.bert.embeddings = embeddings
            # Buffers are no parameters: `materialise` gives them no values, so they skip the meta device.
            with torch.device("cpu"):
                positions = torch.arange(config.sequence).unsqueeze(0)
                embeddings.register_buffer("position_ids", positions, persistent=False)
                embeddings.register_buffer("token_type_ids", torch.zeros_like(positions), persistent=False)
        elif self.has_table:
            self.bert.embeddings = _TokenTable()
            self.bert.embeddings.word_embeddings = nn.Embedding(config.vocabulary, config.hidden)
        self.bert.encoder = _BertEncoder()
        self.bert.encoder.layer = Submodules(
            {str(index): BertLayer(hugging_face, layer_idx=index) for index in self.block_indices}
        )
        if self.ends:
            self.cls = _Head()
            self.cls.predictions = _Predictions()
            self.cls.predictions.transform = BertPredictionHeadTransform(hugging_face)
            if config.tied_embeddings:
                self.cls.predictions.bias = nn.Parameter(torch.zeros(config.vocabulary))
            else:
                self.cls.predictions.decoder = nn.Linear(config.hidden, config.vocabulary)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.bert.encoder.layer.values())

    def initial(self, name: str) -> Initial:
        if "LayerNorm" in name:
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        return Initial() if name.endswith("bias") else Initial(deviation=self.initializer_range)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from tokens (b, s) or states (b, s, hidden) to states or logits (b, s,
        vocabulary)."""
        functions: list[LayerFunction] = [self._embed] if self.embeds else []
        functions += self.bert.encoder.layer.values()
        return [*functions, self._head] if self.ends else functions

    def branches(self, inputs: torch.Tensor) -> Iterator[Branch]:
        for layer in self.bert.encoder.layer.values():
            attention, output = layer.attention, layer.output
            yield _normed_branch(partial(_attend, attention), attention.output)
            yield _normed_branch(partial(_feed_forward, layer), output)

    def embed(
        self, rows: torch.Tensor, tokens: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        embeddings = self.bert.embeddings
        assert isinstance(embeddings, BertEmbeddings), "the stage embeds"
        positions = self.own_tokens(embeddings.position_ids[:, : tokens.shape[1]])
        embedded: torch.Tensor = embeddings(inputs_embeds=rows, position_ids=positions)
        return embedded

    def last_norm(self, stream: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.cls.predictions.transform(stream)
        return hidden

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        predictions = self.cls.predictions
        if self.config.tied_embeddings:
            return (weight_of(self.bert.embeddings.word_embeddings), predictions.bias)
        return (weight_of(predictions.decoder), predictions.decoder.bias)

    def multiply_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden, *self.head_weights)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(self.look_up(tokens), tokens)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.multiply_out(self.last_norm(hidden))


def _normed_branch(inside: LayerFunction, output: BertSelfOutput | BertOutput) -> Branch:
    """Return a branch with a norm after the sum; `output` has its last product and the norm."""

    def after(summed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = output.LayerNorm(finish(output.dense, summed) + stream)
        return normed

    return Branch(_as_it_is, inside, after)


def _as_it_is(stream: torch.Tensor) -> torch.Tensor:
    return stream


def _attend(attention: BertAttention, hidden: torch.Tensor) -> torch.Tensor:
    partial_sum: torch.Tensor = attention.output.dense(attention.self(hidden)[0])
    return partial_sum


def _feed_forward(layer: BertLayer, hidden: torch.Tensor) -> torch.Tensor:
    partial_sum: torch.Tensor = layer.output.dense(layer.intermediate(hidden))
    return partial_sum
