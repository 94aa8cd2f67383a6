"""Stages of decoders, made from the blocks of `transformers`.

They train the types in `weft.describe.decoder_row.TRAINED`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.permutation import inverse
from weft.run.parallel.tensor_layers import Division, finish
from weft.run.stage.decoder_parts import (
    decoder_class,
    decoder_config,
    decoder_names,
    embedding_scale,
    give_buffers,
    meta_model,
    router_of,
    scaled_logits,
    tensor_division,
)
from weft.run.stage.documents import Documents
from weft.run.stage.experts import Capacity
from weft.run.stage.layers import LayerFunction
from weft.run.stage.linear_attention import begin_anew_in_documents, initial_decay, state_of
from weft.run.stage.pieces import Branch
from weft.run.stage.stage_module import Initial, StageModule
from weft.run.stage.submodules import Submodules, weight_of
from weft.run.stage.windows import causal_mask, give_window

# Cosines and sines of positions, each (1 or samples, tokens, head size); or complex numbers of both. None for
# attention without positions.
Angles = tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None
# The mask of scores, or the documents that tokens attend to; None for all tokens before.
Mask = torch.Tensor | Documents | None
# Families whose norms scale by one more than their weight.
_ONE_MORE = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


# Parameters that choose tokens or experts, and have no gradients.
_CHOOSES = re.compile(r"\.indexer\.|\.expert_bias$|\.e_score_correction_bias$")


class DecoderStage(StageModule):
    """Every stage computes the rotary angles itself; without an attention mask the blocks attend causally."""

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__(config, layers)
        self.hugging_face = decoder_config(config)
        names = decoder_names(config.family)
        division = tensor_division(config.family, names)
        self.token_table = names.token_table
        self.held, self.regions = division.held, division.regions
        self.region_ends, self._mixture = division.region_ends, division.mixture
        whole = meta_model(config, self.hugging_face)
        # The type of a model says nothing of its modules.
        inside: Any = whole.base_model
        self._embedding_scale = embedding_scale(inside.get_submodule(names.table), self.hugging_face)
        self._last_norm = f"{names.model}.{names.norm}"
        part = nn.Module()
        if self.has_table:
            # A plain table, which tensor ranks divide; windows of tokens have no padding.
            part.add_module(names.table, nn.Embedding(config.vocabulary, config.hidden))
        self._layers = {str(index): inside.layers[index] for index in self.block_indices}
        part.add_module("layers", Submodules(self._layers))
        rotary = getattr(inside, "rotary_emb", None)
        self._rotary = "" if rotary is None else f"{names.model}.rotary_emb"
        if rotary is not None:
            # The angles are a buffer: `materialise` gives it no values, so it skips the meta device.
            with torch.device("cpu"):
                part.add_module("rotary_emb", type(rotary)(self.hugging_face))
        if self.ends:
            part.add_module(names.norm, inside.get_submodule(names.norm))
        self.add_module(names.model, part)
        if self.ends and not config.tied_embeddings:
            self.lm_head = whole.get_submodule("lm_head")
        self._give_windows()
        for index, block in zip(self.block_indices, self.blocks, strict=True):
            if config.architecture.linear_in(index) is not None:
                begin_anew_in_documents(state_of(block))
            attention: Any = getattr(block, "self_attn", None)
            if getattr(attention, "store_full_length_kv", False):
                # Other models may read stored keys and values; no block of a trained model does.
                attention.store_full_length_kv = False
        self.unlearned = frozenset(name for name, _ in self.named_parameters() if _CHOOSES.search(name))
        for name in self.unlearned:
            # One frozen by the library would be no part of a checkpoint.
            self.get_parameter(name).requires_grad_(True)
        give_buffers(part, whole)

    @classmethod
    def load(cls, family: str) -> None:
        decoder_class(family)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self._layers.values())

    def initial(self, name: str) -> Initial:
        module, _, parameter = name.rpartition(".")
        if parameter == "bias":
            return Initial()
        if "norm" in module.rpartition(".")[2]:
            # The norm of a state scales by its weight.
            one_more = self.config.family in _ONE_MORE and not module.endswith("linear_attn.norm")
            return Initial(mean=0.0 if one_more else 1.0)
        if (decay := initial_decay(self.config.family, parameter)) is not None:
            return decay
        return Initial(deviation=self.hugging_face.initializer_range)

    def layer_functions(self, inputs: torch.Tensor) -> list[LayerFunction]:
        """Return layers from tokens (b, s) or states (b, s, hidden) to states or logits (b, s,
        vocabulary)."""
        functions: list[LayerFunction] = [self._embed] if self.embeds else []
        functions += [
            partial(_compute, block, angles, mask) for block, angles, mask in self._blocks_of(inputs)
        ]
        return [*functions, self._head] if self.ends else functions

    def branches(self, inputs: torch.Tensor) -> Iterator[Branch]:
        of_blocks = zip(self.block_indices, self._blocks_of(inputs), strict=True)
        for index, (block, angles, mask) in of_blocks:
            region, other = (block.get_submodule(name) for name in self.regions)
            functions: tuple[LayerFunction, ...] = (partial(_attend, region, angles, mask), other)
            for inside, last, norms in zip(
                functions, self.region_ends_of(index), _norms_of(block), strict=True
            ):
                yield self._branch(norms, inside, partial(finish, block.get_submodule(last)))

    def functions_or_branches(self, inputs: torch.Tensor) -> list[LayerFunction | tuple[Branch, Branch]]:
        """Return the stage's layers; of a block with experts, the branches of attention and of the mixture.

        Tensor ranks exchange in the modules that begin and end the branches' regions.
        """
        found: list[LayerFunction | tuple[Branch, Branch]] = [self._embed] if self.embeds else []
        of_blocks = zip(self.block_indices, self._blocks_of(inputs), strict=True)
        for index, (block, angles, mask) in of_blocks:
            if not self.config.architecture.has_experts(index):
                found.append(partial(_compute, block, angles, mask))
                continue
            first, second = _norms_of(block)
            attend = partial(_attend, block.get_submodule("self_attn"), angles, mask)
            mixture = block.get_submodule(self._mixture)
            found.append((self._branch(first, attend), self._branch(second, mixture)))
        return [*found, self._head] if self.ends else found

    def _branch(
        self,
        norms: tuple[nn.Module, nn.Module],
        inside: LayerFunction,
        ends: LayerFunction = lambda value: value,
    ) -> Branch:
        """Return a branch with its norms, before and after, its scale and the residual.

        `ends` is the rest of its last module, behind the sum of all ranks' results.
        """
        scale = float(getattr(self.hugging_face, "residual_multiplier", 1.0))
        before, after = norms

        def end(summed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = after(ends(summed))
            return value * scale + stream

        return Branch(before, inside, end)

    def region_ends_of(self, index: int) -> tuple[str, ...]:
        if not self.config.architecture.has_experts(index):
            return self.region_ends
        return (self.region_ends[0], self._mixture)

    def share_experts(self, ranks: ExpertRanks) -> None:
        super().share_experts(ranks)
        for experts in self.experts().values():
            experts.ranks = ranks
        end = f"{self._mixture}.experts"
        self.expert_divisions = {
            name: Division(0, 1, len(parameter))
            for name, parameter in self.named_parameters()
            if name.rpartition(".")[0].endswith(end)
        }

    def place_experts(self, layer: int, order: Sequence[int]) -> None:
        """Take the shares of a layer's experts for those in this order, one rank after the other.

        The caller exchanges the parameters and their states.
        """
        experts = self.experts()[layer]
        experts.places = inverse(torch.tensor(order, device=experts.down_proj.device))
        own = {id(one) for one in experts.parameters()}
        moved = {name for name, one in self.named_parameters() if id(one) in own}
        self.expert_divisions = {
            name: replace(one, order=tuple(order)) if name in moved else one
            for name, one in self.expert_divisions.items()
        }

    def limit_experts(self, capacity: Capacity) -> None:
        """Let the experts of all mixtures take no more tokens of a sample."""
        for experts in self.experts().values():
            experts.capacity = capacity

    def choice_biases(self) -> dict[int, torch.Tensor]:
        """Return the trained routers' biases for the choice of experts, by the positions of their layers."""
        trained = {
            layer: router
            for layer, router in self.routers().items()
            if all(one.requires_grad for one in router.parameters())
        }
        return {layer: router.get_buffer("e_score_correction_bias") for layer, router in trained.items()}

    def routers(self) -> dict[int, nn.Module]:
        """Return the routers of mixtures by the positions of their layers."""
        return {layer: router_of(mixture) for layer, mixture in self._mixtures().items()}

    def experts(self) -> dict[int, Any]:
        """Return the experts of mixtures by the positions of their layers; they have no common type."""
        return {layer: mixture.get_submodule("experts") for layer, mixture in self._mixtures().items()}

    def _mixtures(self) -> dict[int, nn.Module]:
        return {
            index + 1: block.get_submodule(self._mixture)
            for index, block in zip(self.block_indices, self.blocks, strict=True)
            if self.config.architecture.has_experts(index)
        }

    def embed(
        self, rows: torch.Tensor, tokens: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        if self._embedding_scale is None:
            return rows
        # Some types round the scale to the precision of the table.
        scale = self._embedding_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else scale)

    def last_norm(self, stream: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.get_submodule(self._last_norm)(stream)
        return normed

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        tied = self.config.tied_embeddings
        head: Any = self.get_submodule(self.token_table) if tied else self.lm_head
        bias = () if tied or head.bias is None else (head.bias,)
        return (weight_of(head), *bias)

    def multiply_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return scaled_logits(self.logits(hidden, *self.head_weights), self.hugging_face)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(self.look_up(tokens), tokens)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.multiply_out(self.last_norm(hidden))

    def _give_windows(self) -> None:
        """Give blocks their windows; attention with bounded scores takes them as masks."""
        decoder = self.config.architecture
        if decoder.attention_cap:
            return
        for index, block in zip(self.block_indices, self.blocks, strict=True):
            if window := decoder.window(index):
                give_window(block, window)

    def _blocks_of(self, inputs: torch.Tensor) -> Iterator[tuple[nn.Module, Angles, Mask]]:
        """Yield the stage's blocks with the angles and the mask of each."""
        if not self.block_indices:
            return
        # Tensor ranks compute all keys, even if the stage's input has only this rank's tokens.
        divided = (self.tensor.size if self.tensor.divides_sequence else 1) * self.context.size
        tokens, documents = inputs.shape[1] * (1 if self.embeds else divided), self.documents
        positions = torch.arange(tokens, device=inputs.device).unsqueeze(0)
        angles_of = self._angles(positions if documents is None else documents.positions)
        kinds = getattr(self.hugging_face, "layer_types", None)
        decoder = self.config.architecture
        for index, block in zip(self.block_indices, self.blocks, strict=True):
            mask: Mask = documents
            if decoder.attention_cap or decoder.indexer is not None:
                window, like = decoder.window(index), next(block.parameters())
                mask = documents.mask(window, like) if documents else causal_mask(tokens, window, like)
            yield block, angles_of(kinds[index] if kinds else None), mask

    def _angles(self, positions: torch.Tensor) -> Callable[[str | None], Angles]:
        """Return the angles of positions for each kind of layer; some types have several kinds."""
        if not self._rotary:
            return lambda kind: None
        rotary = self.get_submodule(self._rotary)
        # The module takes the device and precision of its result from its first argument.
        like = next(self.blocks[0].parameters())
        known: dict[str | None, Angles] = {}
        several = "layer_type" in inspect.signature(rotary.forward).parameters

        def angles_of(kind: str | None) -> Angles:
            key = kind if several else None
            if key not in known:
                # Some kinds of positions depend on the last one, which another rank may have.
                angles = rotary(like, positions, *((kind,) if several else ()))
                known[key] = self._own_angles(angles)
            return known[key]

        return angles_of

    def _own_angles(self, angles: Angles) -> Angles:
        if angles is None or isinstance(angles, torch.Tensor):
            return None if angles is None else self.context.own_tokens(angles)
        cosines, sines = angles
        return self.context.own_tokens(cosines), self.context.own_tokens(sines)


def _norms_of(block: nn.Module) -> tuple[tuple[nn.Module, nn.Module], tuple[nn.Module, nn.Module]]:
    """Return a block's norms by branch: before it and after it, the identity where there is none.

    The name of the second one alone does not tell its place.
    """
    first, attention = (
        getattr(block, name, nn.Identity()) for name in ("input_layernorm", "post_attention_layernorm")
    )
    for part in ("feedforward", "mlp"):
        names = (f"pre_{part}_layernorm", f"post_{part}_layernorm")
        if any(hasattr(block, name) for name in names):
            second, last = (getattr(block, name, nn.Identity()) for name in names)
            return (first, attention), (second, last)
    return (first, nn.Identity()), (attention, nn.Identity())


def _compute(block: nn.Module, angles: Angles, mask: Mask, hidden: torch.Tensor) -> torch.Tensor:
    """Return the result of a block; some return the tokens that they have chosen, too."""
    result = block(hidden, position_embeddings=angles, attention_mask=mask)
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _attend(attention: nn.Module, angles: Angles, mask: Mask, hidden: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = attention(hidden_states=hidden, position_embeddings=angles, attention_mask=mask)[0]
    return output
