"""The options of expert balance: the table `[experts]`, and the options of a plan's method."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from weft.describe.plan import EXPERT_BALANCE, Choice, Plan
from weft.describe.run_tables.methods import Options, RunTable, checked_options, planned_options
from weft.describe.toml_table import Count, TomlTable
from weft.errors import InputError, Violation

NAME = EXPERT_BALANCE
TABLE_NAME = "experts"
# The tokens over which experts are counted for one token's balance.
Scope = Literal["global-batch", "buffer", "synchronised", "micro-batch", "sequence", "none"]
Weight = Annotated[float, Field(ge=0)]
# The weight of the balance loss in the paper.
WEIGHT = 0.008
# Scopes of one micro-batch of each replica: the ranks of all replicas add up counts for each of them.
BY_INDEX = ("buffer", "synchronised")
# Scopes inside one rank's samples.
_LOCAL = ("micro-batch", "sequence")


class ExpertsTable(TomlTable):
    """The keys of `[experts]`."""

    balance: Scope = Field(
        default="global-batch",
        description="count experts' tokens over a whole step, over the micro-batches so far (buffer) or one "
        "(synchronised) of all replicas, over `samples` (micro-batch), or over one sample (sequence)",
    )
    weight: Weight = Field(default=WEIGHT, description="of the balance loss, which is 1 for equal experts")
    samples: Count | None = Field(
        default=None, description="samples of a micro-batch of the balance, whatever the plan's micro-batches"
    )
    replicas: Count | None = Field(
        default=None, description="replicas that count together; for buffer and synchronised"
    )
    micro_weight: Weight = Field(
        default=0.0, description="of a further balance loss, of each micro-batch of `samples`"
    )
    z_weight: Weight = Field(
        default=0.0, description="of the mean square of the logarithm of the router's partition function"
    )
    bias_rate: Weight = Field(
        default=0.0,
        description="change in a step of the bias with which routers choose experts, such as 0.001",
    )
    capacity: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="most tokens of an expert in a sample over their mean, such as 1.25; later tokens lose "
        "the expert. By default no token does",
    )
    variation: Weight = Field(
        default=0.0,
        description="expected standard deviation of experts' tokens over their mean; for predictions with "
        "expert ranks, and nothing else",
    )
    move_every: Count | None = Field(
        default=None,
        description="steps after which experts move to other ranks, if predictions say that it pays by the "
        "next time; for expert ranks",
    )

    @model_validator(mode="after")
    def _together(self) -> ExpertsTable:
        problems = []
        counted = self.balance in (*BY_INDEX, "micro-batch") or self.micro_weight > 0
        if counted and self.samples is None:
            problem = "missing; the balance counts micro-batches of this many samples"
            problems.append(Violation("samples", problem, "plan.micro_batch_size"))
        if not counted and self.samples is not None:
            problem = f"{self.samples}; balance {self.balance!r} counts no micro-batches"
            problems.append(Violation("samples", problem, 'balance = "micro-batch"'))
        if (self.balance in BY_INDEX) != (self.replicas is not None):
            given, near = (self.replicas, "leave it out") if self.replicas else ("missing", "plan.dp")
            problems.append(Violation("replicas", f"{given}; balance is {self.balance!r}", near))
        if self.micro_weight > 0 and self.balance in (*_LOCAL, "none"):
            problem = f"{self.micro_weight}; balance {self.balance!r} counts no more than a micro-batch"
            problems.append(Violation("micro_weight", problem, "0"))
        # Files with all keys have the default, too.
        if self.balance == "none" and self.weight != WEIGHT:
            problems.append(Violation("weight", f'{self.weight}; balance is "none"', "leave it out"))
        if problems:
            raise InputError(problems)
        return self

    @property
    def group_samples(self) -> int:
        """The samples of a group that is balanced by itself."""
        return self.samples or 1

    def most_tokens(self, sequence: int, choices: int, experts: int) -> int | None:
        """Return the most tokens of an expert in a sample of `sequence` tokens; None without a capacity."""
        if self.capacity is None:
            return None
        return ceil(self.capacity * sequence * choices / experts)

    @property
    def local_weight(self) -> float:
        """The weight of the balance inside groups of samples."""
        return self.weight if self.balance in _LOCAL else self.micro_weight

    @property
    def shared_weight(self) -> float:
        """The weight of the balance with counts of several ranks or micro-batches."""
        return 0.0 if self.balance in (*_LOCAL, "none") else self.weight

    @property
    def counts(self) -> bool:
        """True if ranks add up counts of experts in the step."""
        return self.balance not in (*_LOCAL, "none")


def _options(table: ExpertsTable) -> Options | None:
    return table.model_dump(exclude_none=True)


TABLE = RunTable(method=NAME, key=TABLE_NAME, table=ExpertsTable, options=_options)


def read_options(choice: Choice) -> ExpertsTable:
    """Return the options of the balance in a plan or a job.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return checked_options(ExpertsTable, choice, TABLE_NAME)


def options_of(plan: Plan) -> ExpertsTable | None:
    """Return the options of a plan's balance, or None if it has none.

    Raises:
        InputError: as `read_options`.
    """
    return planned_options(ExpertsTable, plan, NAME)
