"""`run_cycle` compiled by numba, which keeps it on disk from one process to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from weft.predict.cycle import links, ranks, run, state

MODULES = (state, links, ranks, run)
# Functions that numba compiles for `run_cycle`, each after its callees.
CALLED = (
    state.set_rate,
    links.touch_links,
    links.enter_links,
    links.leave_links,
    links.decide,
    links.fill_links,
    links.share_links,
    ranks.enter_ranks,
    ranks.leave_ranks,
    ranks.set_limit,
    ranks.disturb,
    run.post,
    run.end_alone,
    run.next_end,
)


@cache
def compiled_run_cycle() -> Callable[..., Any]:
    """Load the compiled engine from disk in about 0.4 s; if it is not there, compile it, far slower."""
    import numba

    names: dict[str, Any] = {}
    for module in MODULES:
        names |= vars(module)
    # A function finds its callees among its globals; they come before it.
    for function in CALLED:
        names[function.__name__] = numba.njit(_copy(function, names))
    kept = _copy(run.run_cycle, names)
    # numba checks only the file of the function it keeps for changes; the name covers the other files.
    kept.__qualname__ += f"_{digest_of(Path(str(module.__file__)) for module in MODULES)}"
    return numba.njit(cache=True)(kept)  # type: ignore[no-any-return]


def digest_of(files: Iterable[Path]) -> str:
    """Return sixteen hex digits that change when any of the files does."""
    each = (hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(b"".join(each)).hexdigest()[:16]


def _copy(function: Callable[..., Any], names: dict[str, Any]) -> FunctionType:
    """Return a copy of the function with the globals `names`."""
    return FunctionType(function.__code__, names, function.__name__)
