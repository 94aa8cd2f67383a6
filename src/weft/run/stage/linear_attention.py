"""Linear attention of `transformers` in stages: its decays at the start, and its state inside documents."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from weft.run.stage.documents import Documents
from weft.run.stage.stage_module import Initial

# Types whose rates of decay begin between 1 and 16; those of others begin above almost 0.
_FASTER = ("lara_mini", "kimi_linear", "bailing_hybrid")
_LEAST_RATE, _MOST_RATE = 0.01, 16.0
# Types whose steps begin between these; those of others begin at softplus(1).
_STEPPED = ("olmo_hybrid", "kimi_linear", "bailing_hybrid")
_LEAST_STEP, _MOST_STEP = 1e-3, 1e-1


def initial_decay(model_type: str, parameter: str) -> Initial | None:
    """Return the rule of the library for a parameter of decays, by the last part of its name.

    A state decays by exp(-exp(`A_log`) * softplus(its input + `dt_bias`)).
    """
    if parameter == "A_log":
        least = 1.0 if model_type in _FASTER else _LEAST_RATE
        return Initial(made_of_uniform=lambda part: (least + (_MOST_RATE - least) * part).log())
    if parameter == "dt_bias":
        return Initial(made_of_uniform=_biases) if model_type in _STEPPED else Initial(mean=1.0)
    return None


def state_of(block: nn.Module) -> Any:
    """Return the linear attention of a block that has it; its modules have no common type."""
    return block.get_submodule("linear_attn" if hasattr(block, "linear_attn") else "self_attn")


def begin_anew_in_documents(attention: Any) -> None:
    """Let linear attention begin with an empty state in each of the documents that it gets as its mask."""
    whole = attention.forward

    def forward(
        hidden_states: torch.Tensor, *, attention_mask: Documents | None = None, **others: object
    ) -> torch.Tensor:
        def attend(tokens: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = whole(hidden_states=tokens, attention_mask=None, **others)
            return result

        return attend(hidden_states) if attention_mask is None else attention_mask.each(attend, hidden_states)

    attention.forward = forward


def _biases(part: torch.Tensor) -> torch.Tensor:
    """Return the inverse softplus of steps whose logarithms are uniform between those of the limits."""
    least, most = math.log(_LEAST_STEP), math.log(_MOST_STEP)
    return (least + (most - least) * part).exp().expm1().log()
