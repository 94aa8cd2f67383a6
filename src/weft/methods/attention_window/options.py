"""`[attention-window]`: the attention window of each block, in tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import Field

from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import LayerChoice
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import Count, TomlTable
from weft.errors import InputError, Violation

NAME = "attention-window"
_BLOCKS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)
# The family's name of a block; a method may add a suffix.
_BLOCK = re.compile(r"block\.([0-9]+)", re.ASCII)


class AttentionWindowTable(TomlTable):
    """The keys of `[attention-window]`; if both are given, `blocks` holds the exceptions."""

    tokens: Count | None = Field(
        default=None, description="the tokens that each one attends to in all blocks, itself included"
    )
    blocks: Mapping[str, Count] = Field(
        default_factory=dict, description='the same of some blocks only, such as { "0-3" = 128, "6" = 512 }'
    )


def choices_of(table: AttentionWindowTable, graph: LayerGraph) -> tuple[LayerChoice, ...]:
    """Return the choices of a table for the blocks of a model, one for each window.

    Raises:
        InputError: listing every mistake.
    """
    layer_of = {
        int(match[1]): index
        for index, layer in enumerate(graph.layers)
        if (match := _BLOCK.match(layer.name))
    }
    window = dict.fromkeys(layer_of, table.tokens) if table.tokens is not None else {}
    problems = list(_problems(table, layer_of))
    if problems:
        raise InputError(problems)
    for text, tokens in table.blocks.items():
        window |= dict.fromkeys(_numbers(text), tokens)
    return tuple(
        LayerChoice(
            name=NAME,
            layers=tuple(sorted(layer_of[block] for block, one in window.items() if one == tokens)),
            value=tokens,
        )
        for tokens in sorted({tokens for tokens in window.values() if tokens is not None})
    )


def _problems(table: AttentionWindowTable, layer_of: Mapping[int, int]) -> Iterator[Violation]:
    if table.tokens is None and not table.blocks:
        yield Violation(NAME, "needs tokens, or blocks", "tokens = 1024")
        return
    if not layer_of:
        yield Violation(NAME, "the model has no blocks with attention")
        return
    last, seen = max(layer_of), set[int]()
    for text in table.blocks:
        numbers = _numbers(text)
        where = f"{NAME}.blocks"
        if not numbers:
            yield Violation(where, f"{text!r} is no block and no range of blocks", f"0-{last}")
        elif numbers[-1] > last:
            yield Violation(where, f"{text!r}: blocks 0 to {last} exist", str(last))
        elif twice := seen & set(numbers):
            yield Violation(where, f"block {min(twice)} is named more than once")
        seen |= set(numbers)


def _numbers(text: str) -> range:
    match = _BLOCKS.fullmatch(text)
    if match is None:
        return range(0)
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


TABLE = RunTable(
    method=NAME, table=AttentionWindowTable, choices=choices_of, contract=lambda table: Contract.EMPIRICAL
)
