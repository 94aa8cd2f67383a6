"""Adapters in Axolotl's YAML: the table of a run file that asks for the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.describe.units import shown
from weft.doors.configuration import truth, whole
from weft.doors.optimizers import other_optimizer

_LOW_RANK = ("lora", "qlora")
_DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"
# The rank of peft's adapters without one.
_USUAL_RANK = 8
_BASES = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
# A linear layer of a block by its own name, after that of its part or without.
_TARGET = re.compile(r"(?:(?:self_attn|mlp|attn)\.)?(\w+)")
_OTHER_ADAPTERS = {
    "lora_modules_to_save": "whole weights beside an adapter are not modelled",
    "lora_target_parameters": "adapters of stacked experts are not modelled",
    "peft_use_dora": "norms of adapted weights are not modelled",
    "relora": "merges between steps are not modelled",
    "quantize_moe_experts": "experts in few bits are not modelled",
    "gptq": "weights in the few bits of GPTQ are not modelled",
}


def low_rank_tables(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the table `[lora]` of a file with low-rank products; no table for other files."""
    targets = _targets(given)
    if given.get("adapter") not in _LOW_RANK or targets is None:
        return {}
    rank = whole(given.get("lora_r"))
    said = {
        "alpha": whole(given.get("lora_alpha")),
        "dropout": given.get("lora_dropout"),
        "base": next((word for key, word in _BASES.items() if truth(given.get(key))), None),
    }
    table = {"rank": _USUAL_RANK if rank is None else rank, "targets": targets}
    return {"lora": table | {key: value for key, value in said.items() if value is not None}}


def _targets(given: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the names of adapted linear layers, none for all of them; None where they are not known."""
    if truth(given.get("lora_target_linear")):
        return []
    said = given.get("lora_target_modules")
    found = [_TARGET.fullmatch(str(one)) for one in said] if isinstance(said, list) else []
    return [one[1] for one in found if one] if found and all(found) else None


def unpredicted_adapters(given: Mapping[str, Any]) -> list[str]:
    """Return the features of low-rank products that weft does not predict."""
    if not low_rank_tables(given):
        return []
    found = []
    if truth(given.get("load_in_4bit")) and truth(given.get(_DOUBLE, True)):
        found.append("load_in_4bit: predicted without quantised scales, which save 0.37 bits of a weight")
    if other_optimizer("optimizer", given.get("optimizer")):
        found.append(f"optimizer {given['optimizer']}: predicted as AdamW; the states of an adapter are few")
    return found


def incomparable_adapters(given: Mapping[str, Any], *, sharded: bool) -> list[str]:
    """Return the features of adapters that make the job another than the one weft predicts.

    Args:
        sharded: whether replicas share out weights.
    """
    adapter = given.get("adapter")
    few_bits = [key for key in _BASES if truth(given.get(key))]
    if adapter not in _LOW_RANK:
        found = [f"adapter {adapter}: training of this adapter is not modelled"] if adapter else []
        return found + [f"{key}: weights of few bits are not modelled" for key in few_bits]
    found = []
    if _targets(given) is None:
        said, known = given.get("lora_target_modules"), "known are names of linear layers in blocks"
        what = (
            f"lora_target_modules {shown(said)}" if said else f"adapter {adapter} without lora_target_modules"
        )
        found.append(f"{what}: {known}, or lora_target_linear: true")
    if sharded:
        found.append(f"adapter {adapter}: frozen weights that replicas share out are not modelled")
    return found + [
        f"{key} {shown(given[key])}: {problem}"
        for key, problem in _OTHER_ADAPTERS.items()
        if given.get(key) or any(name.startswith(f"{key}.") for name in given)
    ]
