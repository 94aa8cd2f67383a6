"""The parts of a decoder of `transformers`: its configuration, and its modules by the library's plans.

The class of a configuration names its modules in the order of a pipeline (`base_model_pp_plan`). It also
states the division of their products over tensor ranks (`base_model_tp_plan`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from weft.describe.model import ModelConfig
from weft.describe.models import CONFIG_FILE
from weft.errors import InputError, Violation
from weft.run.parallel.tensor_layers import HeldByTensorRanks
from weft.run.stage.experts import IMPLEMENTATION
from weft.run.stage.unfilled import unfilled

_STYLES: Mapping[str, Mapping[str, HeldByTensorRanks]] = {
    "colwise": {"weight": HeldByTensorRanks(axis=0), "bias": HeldByTensorRanks(axis=0)},
    "rowwise": {"weight": HeldByTensorRanks(axis=1)},
    "replicated_with_grad_allreduce": {"weight": HeldByTensorRanks(in_region=True)},
}
# The division of the parameters of experts (experts, outer, inner).
_EXPERTS: Mapping[str, HeldByTensorRanks] = {
    "gate_up_proj": HeldByTensorRanks(axis=1, blocks=2),
    "down_proj": HeldByTensorRanks(axis=2),
}
_ROUTERS = ("gate", "router")
# Products of a mixture that all ranks repeat: of routers, and of the gate of shared experts.
_REPEATED = (*_ROUTERS, "shared_expert_gate")
# Those of latent attention.
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
_BLOCK = "layers.*."
# The modules of a type without a pipeline plan.
_USUAL = ("embed_tokens", "layers", "norm")
# The same function in one kernel, which keeps only its input for the backward pass.
_FUSED = {"gelu_new": "gelu_pytorch_tanh"}


def decoder_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the `transformers` configuration of a model, without dropout and with fused attention.

    Raises:
        InputError: if `transformers` refuses the model's `config.json`.
    """
    if not config.record:
        return _llama_config(config)
    record: dict[str, Any] = json.loads(config.record)
    # Training starts without dropout, and computes the tanh of GELU in one kernel.
    quiet = {key: 0.0 if _drops_out(key) else _FUSED.get(str(value), value) for key, value in record.items()}
    implementation = "eager" if config.architecture.attention_cap else "sdpa"
    with _refusals(config):
        made: PreTrainedConfig = _config_class(config.family).from_dict(
            {**quiet, "attn_implementation": implementation, "experts_implementation": IMPLEMENTATION}
        )
    return made


@contextmanager
def _refusals(config: ModelConfig) -> Iterator[None]:
    """Raise what `transformers` says of a broken `config.json` as one line."""
    try:
        yield
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        problem = " ".join(f"transformers refuses its {CONFIG_FILE}: {error}".split())
        raise InputError(Violation(f"model {config.name}", problem)) from None


def _drops_out(key: str) -> bool:
    return key.endswith(("_pdrop", "dropout"))


def _llama_config(config: ModelConfig) -> LlamaConfig:
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


def _config_class(model_type: str) -> type[PreTrainedConfig]:
    if model_type not in CONFIG_MAPPING:
        problem = f"transformers {version('transformers')} has no {model_type}; a newer version has it"
        raise InputError(Violation("model", problem))
    found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return found


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """Names of a model's modules: that of the model without its head, and inside it table and last norm."""

    model: str
    table: str
    norm: str

    @property
    def token_table(self) -> str:
        return f"{self.model}.{self.table}"


def decoder_class(model_type: str) -> type[PreTrainedModel]:
    """Return the class of the model with its head."""
    # Typed loosely because a type may have several classes; a decoder has one.
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[_config_class(model_type)]
    made: type[PreTrainedModel] = found
    return made


def decoder_names(model_type: str) -> DecoderNames:
    """Return the names of a model's modules, from the library's pipeline plan."""
    plan = list(_config_class(model_type).base_model_pp_plan or _USUAL)
    return DecoderNames(decoder_class(model_type).base_model_prefix, plan[0], plan[-1])


def meta_model(config: ModelConfig, hugging_face: PreTrainedConfig) -> PreTrainedModel:
    """Return the whole model of `transformers` on the meta device.

    Raises:
        InputError: if `transformers` cannot build the model of its `config.json`.
    """
    with unfilled(), _refusals(config):
        model: PreTrainedModel = decoder_class(config.family)(hugging_face)
    return model


@dataclass(frozen=True, slots=True)
class TensorDivision:
    """The division of a decoder's blocks over tensor ranks.

    Attributes:
        held: the division of parameters by the end of their names.
        regions: modules of a block that begin with products divided by columns.
        region_ends: products of a block without experts that are divided by rows, and end the regions.
        mixture: the module with experts of a block that has them; empty if none has.
    """

    held: Mapping[str, HeldByTensorRanks]
    regions: tuple[str, ...]
    region_ends: tuple[str, ...]
    mixture: str


def tensor_division(model_type: str, names: DecoderNames) -> TensorDivision:
    """Return the division that the library's tensor plan states."""
    styles = {
        name.removeprefix(_BLOCK): style
        for name, style in (_config_class(model_type).base_model_tp_plan or {}).items()
        if name.startswith(_BLOCK)
    }
    experts = next((name for name, style in styles.items() if style == "moe_tp_experts"), "")
    mixture = experts.rpartition(".")[0]
    held = {
        f"{name}.{parameter}": division
        for name, style in styles.items()
        for parameter, division in _STYLES.get(style, {}).items()
    }
    held |= {f"{name}.weight": HeldByTensorRanks(axis=0) for name in (names.table, "lm_head")}
    held |= {
        f"self_attn.{name}.{parameter}": HeldByTensorRanks(in_region=True)
        for name in _LATENT
        for parameter in ("weight", "bias")
    }
    if mixture:
        held |= _held_of_mixture(mixture)
    ends = [name for name, style in styles.items() if style == "rowwise" and not _inside(name, mixture)]
    regions = [
        mixture if _inside(name, mixture) else name.rpartition(".")[0]
        for name, style in styles.items()
        if style in ("colwise", "packed_colwise")
    ]
    return TensorDivision(held, tuple(dict.fromkeys(regions)), tuple(ends), mixture)


def router_of(mixture: nn.Module) -> nn.Module:
    """Return the router of a mixture: it gives logits, weights, and the chosen experts of tokens."""
    return next(one for name, one in mixture.named_children() if name in _ROUTERS)


def _inside(name: str, mixture: str) -> bool:
    """Return True for a part of a mixture that is no product of a plain feed-forward in its place."""
    return bool(mixture) and name.startswith(f"{mixture}.") and "." in name.removeprefix(f"{mixture}.")


def _held_of_mixture(mixture: str) -> dict[str, HeldByTensorRanks]:
    """Return the division of a mixture's parameters; those that all ranks repeat have partial gradients."""
    columns, rows, repeated = (
        HeldByTensorRanks(axis=0),
        HeldByTensorRanks(axis=1),
        HeldByTensorRanks(in_region=True),
    )
    held = {f"{mixture}.experts.{name}": one for name, one in _EXPERTS.items()}
    held |= {f"{mixture}.{name}.weight": repeated for name in _REPEATED}
    return held | {
        f"{mixture}.{shared}.{name}.weight": rows if name == "down_proj" else columns
        for shared in ("shared_expert", "shared_experts")
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def give_buffers(module: nn.Module, whole: PreTrainedModel) -> None:
    """Give buffers of the meta device the first values of the library: `materialise` gives them none."""
    for part in module.modules():
        missing = [name for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta]
        for name in missing:
            part.register_buffer(name, torch.zeros_like(part.get_buffer(name), device="cpu"))
        if missing:
            with torch.device("cpu"):
                whole._init_weights(part)


def embedding_scale(table: nn.Module, hugging_face: PreTrainedConfig) -> torch.Tensor | float | None:
    """Return the factor of the rows of a table; a tensor where the library has one, in fp32."""
    if hasattr(table, "scalar_embed_scale"):
        return torch.tensor(table.scalar_embed_scale, device="cpu")
    if getattr(hugging_face, "mup_enabled", False):
        return math.sqrt(hugging_face.hidden_size)
    factor: float | None = getattr(hugging_face, "embedding_multiplier", None)
    return factor


def scaled_logits(logits: torch.Tensor, hugging_face: PreTrainedConfig) -> torch.Tensor:
    """Return logits with the scale and the bound of their family, as its model computes them."""
    if (divisor := getattr(hugging_face, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(hugging_face, "logit_scale", None)) is not None:
        logits = logits * factor
    if (cap := getattr(hugging_face, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
