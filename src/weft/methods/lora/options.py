"""The options of low-rank adaptation: the table `[lora]`, and the options of a plan's method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from weft.describe.block_products import BlockProduct
from weft.describe.plan import Choice
from weft.describe.run_tables.methods import Options, RunTable, checked_options
from weft.describe.toml_table import TOML_ARRAY, Count, TomlTable, Word
from weft.errors import InputError, Violation, nearest

NAME = "lora"
# Names of the two products beside a linear layer, as peft has them: operand x A, then x B.
A, B = "lora_A", "lora_B"
_SEPARATOR = ","

# The type of frozen linear layers at rest: NF4 (Dettmers et al., QLoRA, arXiv 2305.14314, section 3), or
# integers of 8 bits. Without one, the precision of the products.
Base = Literal["nf4", "int8"]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class LoraTable(TomlTable):
    """The keys of `[lora]`."""

    rank: Count = Field(default=16, description="the inner size of the products beside each linear layer")
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="their sum is scaled by alpha / rank; twice the rank if absent"
    )
    targets: Annotated[tuple[Word, ...], TOML_ARRAY] = Field(
        default=(), description='linear layers of the blocks, such as ["q_proj", "v_proj"]; all if absent'
    )
    dropout: Dropout = Field(
        default=0.0, description="the share of the operands' elements that the products leave out in training"
    )
    base: Base | None = Field(
        default=None,
        description="type of the blocks' frozen linear layers at rest; train.precision if absent",
    )


def low_rank_choice(
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (),
    *,
    base: Base | None = None,
    dropout: float = 0.0,
) -> Choice:
    """Return the method with these options; `alpha` is twice the rank if it is absent."""
    options: Options = {
        "rank": rank,
        "alpha": 2.0 * rank if alpha is None else alpha,
        "targets": _SEPARATOR.join(targets),
        **({} if base is None else {"base": base}),
        **({"dropout": dropout} if dropout else {}),
    }
    return Choice(name=NAME, options=options)


def _options(table: LoraTable) -> Options:
    return low_rank_choice(
        table.rank, table.alpha, table.targets, base=table.base, dropout=table.dropout
    ).options


TABLE = RunTable(method=NAME, table=LoraTable, options=_options)


class LowRank(TomlTable):
    """The options of a plan's method: the rank and scale of the products, and the names of their layers.

    `base` is the type of the blocks' frozen linear layers at rest. `dropout` is the share of an operand's
    elements that low-rank products leave out.
    """

    rank: Count
    alpha: Annotated[float, Field(gt=0)]
    targets: str
    base: Base | None = None
    dropout: Dropout = 0.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def chosen(self, products: Sequence[BlockProduct]) -> list[BlockProduct]:
        """Return the linear layers that have low-rank products.

        Raises:
            InputError: with one line for each target that is no linear layer of the model.
        """
        names = list(dict.fromkeys(one.name for one in products))
        targets = list(filter(None, self.targets.split(_SEPARATOR)))
        problems = [
            Violation(f"{NAME}.targets", f"{name!r} is not one of {', '.join(names)}", nearest(name, names))
            for name in targets
            if name not in names
        ]
        if problems:
            raise InputError(problems)
        return [one for one in products if not targets or one.name in targets]


def read_options(choice: Choice) -> LowRank:
    """Return the options of a plan's method or of a job's.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return checked_options(LowRank, choice, NAME)
