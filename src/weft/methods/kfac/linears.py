"""The linear layers that K-FAC treats: those of blocks, and those of a user's own model.

A plan states them, by layer of the model: ``1-4: 64>64,32,32 64/>64; 5: 49x64>10``. Linear layers that read
one value have one factor of inputs together. Those of a user's own model state the rows of a sample, too.
Tensor ranks divide what a linear layer returns, or what it reads (``/``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from weft.describe.block_products import block_products, has_experts
from weft.describe.families.own import FAMILY, CalledLinear, ShowsLinears, own_model
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

# More than a layer has factors of one side.
FACTORS = 64
# Factors of more features would take more than half a gigabyte each, and their inverses a second.
_MOST_FEATURES = 10_000
_OPERAND = r"(?:\d{1,9}x)?\d{1,9}/?>\d{1,9}(?:,\d{1,9})*"
_LAYERS = re.compile(rf"(\d{{1,6}})-(\d{{1,6}}): ({_OPERAND}(?: {_OPERAND})*)", re.ASCII)


class Operand(NamedTuple):
    """The linear layers of one layer of the model that read one value.

    Attributes:
        inner: the features that they read.
        columns: the features that each of them returns.
        rows: the vectors of a sample that they read; None: its tokens.
        divides_inner: tensor ranks divide the features that they read, and not those that they return.
    """

    inner: int
    columns: tuple[int, ...]
    rows: int | None = None
    divides_inner: bool = False

    def __str__(self) -> str:
        rows = "" if self.rows is None else f"{self.rows}x"
        return f"{rows}{self.inner}{'/' * self.divides_inner}>{','.join(map(str, self.columns))}"

    @property
    def weights(self) -> tuple[int, ...]:
        """The parameters of each weight."""
        return tuple(self.inner * one for one in self.columns)

    @classmethod
    def read(cls, text: str) -> Operand:
        """Return the operand of a text."""
        read, _, columns = text.partition(">")
        rows, _, inner = read.rpartition("x")
        sizes = int(inner.removesuffix("/")), tuple(map(int, columns.split(",")))
        return cls(*sizes, int(rows) if rows else None, inner.endswith("/"))


class LinearLayers(NamedTuple):
    """The linear layers in one layer of the model, by operand, in their order."""

    operands: tuple[Operand, ...]

    def factors(self, side: int) -> list[tuple[int, int | None]]:
        """Return the size of each factor of inputs (0) or outputs (1), and its operand's rows."""
        if side == 0:
            return [(one.inner, one.rows) for one in self.operands]
        return [(size, one.rows) for one in self.operands for size in one.columns]

    def sizes(self, side: int) -> list[int]:
        """Return the sizes of the factors of one side."""
        return [size for size, _ in self.factors(side)]

    def divides(self, side: int) -> list[bool]:
        """Return, for each factor of one side, whether tensor ranks divide its features."""
        if side == 0:
            return [one.divides_inner for one in self.operands]
        return [not one.divides_inner for one in self.operands for _ in one.columns]

    def __str__(self) -> str:
        return " ".join(map(str, self.operands))


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
        known = operands.get(one.reads, Operand(one.inner, (), divides_inner=one.divided == "inner"))
        operands[one.reads] = known._replace(columns=(*known.columns, one.columns))
    block = LinearLayers(tuple(operands.values()))
    return {1 + index: block for index in range(config.layers)}


def _own(config: ModelConfig) -> Iterator[tuple[int, LinearLayers]]:
    """Yield the linear layers of a user's own model.

    Raises:
        InputError: for a model that does not tell them, whose layers form a graph, or with too many in one.
    """
    model = own_model(config.name)
    if not isinstance(model, ShowsLinears):
        problem = f"{config.name} does not tell its linear layers (`linears(index)`)"
        raise InputError(Violation("kfac", problem, "a weft.BlockModel"))
    if not model.layer_graph().is_chain:
        raise InputError(Violation("kfac", f"the layers of {config.name} form a graph", "a chain of layers"))
    for position in range(config.layers + 2):
        operands = []
        for _, some in groupby(treatable(model.linears(position)), lambda one: one.reads):
            linears = list(some)
            columns = tuple(one.columns for one in linears)
            operands.append(Operand(linears[0].inner, columns, linears[0].rows))
        if sum(len(one.columns) for one in operands) > FACTORS:
            problem = f"layer {position} of {config.name} has more than {FACTORS} linear layers"
            raise InputError(Violation("kfac", problem, "more layers of the model"))
        if operands:
            yield position, LinearLayers(tuple(operands))


def treatable(linears: Sequence[CalledLinear]) -> list[CalledLinear]:
    """Return the linear layers with factors of a size that can be inverted."""
    return [one for one in linears if max(one.inner, one.columns) <= _MOST_FEATURES]


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
        layer = LinearLayers(tuple(map(Operand.read, match[3].split())))
        found |= dict.fromkeys(range(int(match[1]), int(match[2]) + 1), layer)
    return found
