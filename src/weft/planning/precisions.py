"""`precision = "any"`: the plan in the precision that serves the goal best.

Precision is part of a problem, because measurements and speeds depend on it. So each one needs its own
search, and the best plans are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from weft.describe.plan_subject import cluster_of_run
from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import ANY_PRECISION
from weft.errors import InputError, Violation

# The fast precisions of the runtime. fp64 is never faster. fp16 leaves out steps, so it stands in for bf16.
SEARCHED = ("bf16", "fp16", "fp32")

Found = TypeVar("Found")


def precisions_of(run: RunFile) -> tuple[str, ...]:
    """Return the precisions that a run file leaves to the search, all known to its devices, or the given one.

    Raises:
        InputError: when the devices have none of the searched precisions.
    """
    if run.train.precision != ANY_PRECISION:
        return (run.train.precision,) if run.train.precision else ()
    groups = cluster_of_run(run).groups
    able = [name for name in SEARCHED if all(name in group.device.flops_per_s for group in groups)]
    if able[:2] == ["bf16", "fp16"]:
        able.remove("fp16")
    if not able:
        shared = set.intersection(*(set(group.device.flops_per_s) for group in groups))
        problem = f"not all devices compute {' or '.join(SEARCHED)}"
        raise InputError(Violation("train.precision", problem, ", ".join(sorted(shared))))
    return tuple(able)


def in_precision(run: RunFile, precision: str) -> RunFile:
    """Return the run file with its precision decided."""
    return run.model_copy(update={"train": run.train.model_copy(update={"precision": precision})})


def searched_in_each(run: RunFile, search: Callable[[RunFile], Found]) -> Mapping[str, Found]:
    """Return the result of a search in each precision that has one.

    Raises:
        InputError: the error of the last search, when none has a result.
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
