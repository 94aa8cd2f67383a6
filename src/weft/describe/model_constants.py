"""Constants of a model that a `config.json` may set: no sizes, but with others it computes something else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.describe.units import shown
from weft.errors import Violation

# The fields of `ModelConfig` and the keys of `config.json`, by family.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt": {"norm_epsilon": "layer_norm_epsilon"},
    "llama": {"norm_epsilon": "rms_norm_eps", "rotary_base": "rope_theta"},
    "bert": {"norm_epsilon": "layer_norm_eps"},
    "vit": {"norm_epsilon": "layer_norm_eps"},
}
# Where newer versions of `transformers` keep the keys of rotary positions.
_ROTARY = "rope_parameters"


def read_constants(
    record: Mapping[str, Any], family: str, where: str
) -> tuple[dict[str, float], list[Violation]]:
    """The constants that a model configuration gives, and what is wrong with them."""
    constants: dict[str, float] = {}
    problems: list[Violation] = []
    rotary = record.get(_ROTARY)
    for name, key in _KEYS.get(family, {}).items():
        value = record.get(key)
        if value is None and isinstance(rotary, Mapping):
            value = rotary.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            problems.append(Violation(f"{where}: {key}", f"{shown(value)}: must be a number above 0"))
        else:
            constants[name] = float(value)
    return constants, problems
