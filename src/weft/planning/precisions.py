"""`precision = "any"`: the plan of the precision that serves the goal best.

Precision is part of a problem, because measurements and speeds depend on it. So each one is a search of its
own, and their best plans are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from weft.describe.cluster_file import parse_cluster
from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import ANY_PRECISION
from weft.errors import InputError, Violation

# What the runtime trains in for its speed. fp64 is never faster, and fp16 would need its loss scaled.
SEARCHED = ("bf16", "fp32")

Found = TypeVar("Found")


def precisions_of(run: RunFile) -> tuple[str, ...]:
    """Return the precisions to search: one, or several that all devices compute.

    Raises:
        InputError: when the devices have none of the searched precisions.
    """
    if run.train.precision != ANY_PRECISION:
        return (run.train.precision,) if run.train.precision else ()
    groups = parse_cluster(run.cluster.use).groups
    able = tuple(name for name in SEARCHED if all(name in group.device.flops_per_s for group in groups))
    if not able:
        shared = set.intersection(*(set(group.device.flops_per_s) for group in groups))
        problem = f"not all devices compute {' or '.join(SEARCHED)}"
        raise InputError(Violation("train.precision", problem, ", ".join(sorted(shared))))
    return able


def in_precision(run: RunFile, precision: str) -> RunFile:
    """Return the run file with its precision decided."""
    return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})


def searched_in_each(run: RunFile, search: Callable[[RunFile], Found]) -> Mapping[str, Found]:
    """Return the results of a search, for each precision with any.

    Raises:
        InputError: from the last search, if none finds anything.
    """
    found: dict[str, Found] = {}
    refused: InputError | None = None
    for precision in precisions_of(run):
        try:
            found[precision] = search(in_precision(run, precision))
        except InputError as error:
            refused = error
    if not found:
        assert refused is not None, "there is a precision to search in"
        raise refused
    return found
