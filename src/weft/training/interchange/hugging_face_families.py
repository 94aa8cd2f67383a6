"""The model families in `transformers`: their classes, tensor names and further stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from weft.describe.decoder_row import ROWS, TRAINED
from weft.describe.families.own import FAMILY as OWN
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation, require_choice
from weft.run.stage.decoder_parts import decoder_class, decoder_config, decoder_names
from weft.run.stage.families.bert import bert_config
from weft.run.stage.families.gpt import gpt_config
from weft.run.stage.families.resnet import resnet_config
from weft.run.stage.families.vit import vit_config
from weft.training.interchange.expert_tensors import ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceFamily:
    """One family.

    Attributes:
        architecture, configuration: the class of the model, and its configuration for a model's sizes.
        function: keys of the configuration, other than sizes, that change the computed function.
        prefix: the prefix of names in the model with a head, which the model without a head lacks.
        embedding: the token table, or the first tensor if there is none.
        tied: copies of tied tensors: the kept name by the name that is left out.
        positions: the table of positions; rows beyond the longest sequence are never read.
        positions_key: the key of the number of its rows.
        superfluous: pattern of names that may be stored and are never read: buffers that every version
            computes, and heads of other tasks.
        spellings: (module's part of a name, part in files), for parts that differ.
        experts: the names of an expert's products in files; None if they have no tensors of their own.
    """

    architecture: str
    configuration: Callable[[ModelConfig], PreTrainedConfig]
    function: tuple[str, ...]
    prefix: str
    embedding: str
    tied: Mapping[str, str]
    positions: str = ""
    positions_key: str = ""
    superfluous: str = ""
    spellings: tuple[tuple[str, str], ...] = ()
    experts: ExpertNames | None = None

    def stored(self, name: str) -> str:
        """Return a tensor's name in files."""
        for ours, theirs in self.spellings:
            name = name.replace(ours, theirs)
        return name

    def stored_tensors(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of files, with their names, that one of the model's tensors is made of."""
        if self.experts is None:
            yield self.stored(name), tensor
        else:
            yield from self.experts.parts(self.stored(name), tensor)


# Of decoders whose files have other names than their modules.
_SPELLINGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "mixtral": ((".mlp.", ".block_sparse_moe."),),
    "exaone_moe": ((".mlp.gate.e_score", ".mlp.e_score"),),
    "laguna": ((".shared_experts.", ".shared_expert."), (".mlp.gate.e_score", ".mlp.experts.e_score")),
    "granitemoe": (
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ),
}
# Of types whose experts' products have other names in files.
_EXPERTS = {"mixtral": ExpertNames("w1", "w3", "w2")}
_FAMILIES: Mapping[str, HuggingFaceFamily] = {
    "gpt": HuggingFaceFamily(
        architecture="GPT2LMHeadModel",
        configuration=gpt_config,
        function=(
            "activation_function",
            "layer_norm_epsilon",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
        ),
        prefix="transformer.",
        embedding="transformer.wte.weight",
        tied={"lm_head.weight": "transformer.wte.weight"},
        positions="transformer.wpe.weight",
        positions_key="n_positions",
        superfluous=r"(.*\.)?attn\.(bias|masked_bias)",
    ),
    "bert": HuggingFaceFamily(
        architecture="BertForMaskedLM",
        configuration=bert_config,
        function=("hidden_act", "layer_norm_eps"),
        prefix="bert.",
        embedding="bert.embeddings.word_embeddings.weight",
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        positions="bert.embeddings.position_embeddings.weight",
        positions_key="max_position_embeddings",
        superfluous=r"(.*\.)?embeddings\.position_ids|(bert\.)?pooler\..*|cls\.(seq_relationship\..*|predictions\.bias)",
    ),
    "vit": HuggingFaceFamily(
        architecture="ViTForImageClassification",
        configuration=vit_config,
        function=("hidden_act", "layer_norm_eps", "qkv_bias"),
        prefix="vit.",
        embedding="vit.embeddings.cls_token",
        tied={},
        superfluous=r"(vit\.)?pooler\..*",
        spellings=(
            ("vit.layers.", "vit.encoder.layer."),
            ("attention.q_proj", "attention.attention.query"),
            ("attention.k_proj", "attention.attention.key"),
            ("attention.v_proj", "attention.attention.value"),
            ("attention.o_proj", "attention.output.dense"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
        ),
    ),
    "resnet": HuggingFaceFamily(
        architecture="ResNetForImageClassification",
        configuration=resnet_config,
        function=("hidden_act", "downsample_in_first_stage", "downsample_in_bottleneck"),
        prefix="resnet.",
        embedding="resnet.embedder.embedder.convolution.weight",
        tied={},
    ),
}


def hugging_face_family(config: ModelConfig) -> HuggingFaceFamily:
    """Return the family of a model in `transformers`.

    Raises:
        InputError: for a family without folders of `transformers`.
    """
    if config.family == OWN:
        problem = "a model of your own has no format of transformers; its checkpoints are safetensors files"
        raise InputError(Violation(f"model {config.name}", problem))
    require_choice(f"model {config.name}", config.family, (*_FAMILIES, *TRAINED))
    # The names of a decoder need its modules, which take time to import.
    return _decoder(config.family) if config.family in TRAINED else _FAMILIES[config.family]


def family_of_files(config: ModelConfig) -> HuggingFaceFamily:
    """Return the family of a model whose tensors have known names in files.

    Raises:
        InputError: for a family without folders of `transformers`, or one with other names.
    """
    if config.family in TRAINED and not ROWS[config.family].exported:
        problem = f"weft does not know the names of the tensors of {config.family} in files"
        raise InputError(Violation(f"model {config.name}", problem))
    return hugging_face_family(config)


def _decoder(model_type: str) -> HuggingFaceFamily:
    names = decoder_names(model_type)
    return HuggingFaceFamily(
        architecture=decoder_class(model_type).__name__,
        configuration=decoder_config,
        # Presets are models of this type; others compute the function of their own file.
        function=("hidden_act", "rms_norm_eps", "rope_parameters") if model_type == "llama" else (),
        prefix=f"{names.model}.",
        embedding=f"{names.token_table}.weight",
        tied={"lm_head.weight": f"{names.token_table}.weight"},
        superfluous=r"(.*\.)?rotary_emb\.inv_freq",
        spellings=_SPELLINGS.get(model_type, ()),
        experts=None if ROWS[model_type].experts is None else _EXPERTS.get(model_type, ExpertNames()),
    )
