"""The linear layers that K-FAC treats: those of blocks, and all of a user's own model.

A plan states them, by layer of the model: ``1-4: 64>64,32,32 64>64; 5: 64>10``. Linear layers that read one
value have one factor of inputs together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from weft.describe.block_products import block_products, has_experts
from weft.describe.families.own import FAMILY, own_model
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

_OPERAND = r"(?:\d{1,9})>(?:\d{1,9}(?:,\d{1,9})*)"
_LAYERS = re.compile(rf"(\d{{1,6}})-(\d{{1,6}}): ({_OPERAND}(?: {_OPERAND})*)", re.ASCII)


class Operand(NamedTuple):
    """The linear layers of one layer of the model that read one value.

    Attributes:
        inner: the features that they read.
        columns: the features that each of them returns.
    """

    inner: int
    columns: tuple[int, ...]


class LinearLayers(NamedTuple):
    """The linear layers in one layer of the model, by operand, in their order."""

    operands: tuple[Operand, ...]

    @property
    def inputs(self) -> list[int]:
        """The sizes of the factors of inputs."""
        return [one.inner for one in self.operands]

    @property
    def outputs(self) -> list[int]:
        """The sizes of the factors of gradients of outputs."""
        return [size for one in self.operands for size in one.columns]

    def sizes(self, side: int) -> list[int]:
        """Return the sizes of the factors of inputs (0) or outputs (1)."""
        return self.outputs if side else self.inputs

    def __str__(self) -> str:
        return " ".join(f"{one.inner}>{','.join(map(str, one.columns))}" for one in self.operands)


# By position in the model.
Treated = Mapping[int, LinearLayers]


def treated_in(config: ModelConfig) -> Treated:
    """Return the linear layers of a model that K-FAC treats.

    Raises:
        InputError: for a model without them, with experts, or whose linear layers weft cannot name.
    """
    if config.family == FAMILY:
        found = dict(_own(config))
        if not found:
            raise InputError(Violation("kfac", f"{config.name} has no linear layers", "leave [kfac] out"))
        return found
    if any(has_experts(config, block) for block in range(config.layers)):
        problem = f"{config.name} has experts, whose tokens differ from step to step"
        raise InputError(Violation("kfac", problem, "a dense model"))
    operands: dict[str, Operand] = {}
    for one in block_products(config):
        known = operands.get(one.reads, Operand(one.inner, ()))
        operands[one.reads] = Operand(one.inner, (*known.columns, one.columns))
    block = LinearLayers(tuple(operands.values()))
    return {1 + index: block for index in range(config.layers)}


def _own(config: ModelConfig) -> Iterator[tuple[int, LinearLayers]]:
    """Yield the linear layers of a user's own model: modules with `in_features` and `out_features`."""
    model = own_model(config.name)
    for position in range(config.layers + 2):
        linears = [one for one in model.layer(position).modules() if hasattr(one, "in_features")]
        operands = tuple(Operand(one.in_features, (one.out_features,)) for one in linears)
        if operands:
            yield position, LinearLayers(operands)


def treated_text(treated: Treated) -> str:
    """Return linear layers as a plan's option."""
    found = []
    numbered = enumerate(sorted(treated))
    for text, some in groupby(numbered, lambda pair: (str(treated[pair[1]]), pair[1] - pair[0])):
        positions = [position for _, position in some]
        found.append(f"{positions[0]}-{positions[-1]}: {text[0]}")
    return "; ".join(found)


def read_treated(text: str) -> Treated:
    """Return the linear layers of a plan's option.

    Raises:
        InputError: for a text of another form.
    """
    found: dict[int, LinearLayers] = {}
    for one in text.split("; "):
        match = _LAYERS.fullmatch(one)
        if match is None or int(match[1]) > int(match[2]):
            problem = f"{one[:40]!r} does not list the linear layers of layers of the model"
            raise InputError(Violation("plan: methods: kfac: linears", problem, "1-4: 64>64,32,32 64>64"))
        pairs = (operand.split(">") for operand in match[3].split())
        layer = LinearLayers(tuple(Operand(int(n), tuple(map(int, m.split(",")))) for n, m in pairs))
        found |= dict.fromkeys(range(int(match[1]), int(match[2]) + 1), layer)
    return found
