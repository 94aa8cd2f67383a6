"""The event engine: one cycle of a Program as arrays, run in plain Python or compiled.

Small programs run the plain `run_cycle`, because importing a compiler costs more. Large ones run it through
numba.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.predict.cycle import links, ranks, run, state
from weft.predict.cycle.run import run_cycle
from weft.predict.cycle.state import Tasks
from weft.predict.tasks import SimulatedTasks
from weft.program.arrays import Ints

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


# Work above which loading the compiled engine pays off. Plain Python takes about 0.2 us per instruction and
# edge and 5 us per task, in about three cycles. The compiled engine takes about 0.4 s to load from its cache.
COMPILED_FROM = 600_000
WORK_OF_TASK = 20


@dataclass(frozen=True, kw_only=True)
class CycleGraph:
    """Dependencies of one cycle.

    Attributes:
        source, target, delay: edges inside the cycle; the target may start `delay` ticks after the source
            has ended.
        occupancy: ticks from start to end, per instruction.
        meeting: number of the instruction's collective, or -1; its members start together when the last
            one is ready.
        tasks: instructions that can slow each other; undisturbed, they take their occupancy.
    """

    source: Ints
    target: Ints
    delay: Ints
    occupancy: Ints
    meeting: Ints
    tasks: SimulatedTasks

    def __len__(self) -> int:
        return len(self.occupancy)

    @cached_property
    def _arrays(self) -> tuple[npt.NDArray[np.signedinteger], ...]:
        """Predecessor counts, successors in rows, members of the meetings in rows, tasks.

        Numbers of rows and edges are narrow, because fetching them from memory takes most of the time.
        """
        length = len(self)
        order = np.argsort(self.source, kind="stable")
        waiting = np.bincount(self.target, minlength=length)
        first = np.concatenate([[0], np.cumsum(np.bincount(self.source, minlength=length))])
        taking_part = np.flatnonzero(self.meeting >= 0)
        members = taking_part[np.argsort(self.meeting[taking_part], kind="stable")]
        sizes = np.bincount(self.meeting[taking_part], minlength=1)
        first_member = np.concatenate([[0], np.cumsum(sizes)])
        times = self.delay[order], self.occupancy
        return (
            *(array.astype(np.int32) for array in (waiting, first, self.target[order])),
            *(array.astype(np.int64, copy=False) for array in times),
            *(array.astype(np.int32) for array in (self.meeting, first_member, members)),
            self.tasks.of_row,
        )

    @cached_property
    def _lists(self) -> tuple[list[int], ...]:
        return tuple(array.tolist() for array in self._arrays)

    def run(self, release: Ints, compiled: bool | None = None) -> tuple[Ints, Ints, Ints]:
        """Return start and end, in ticks, of every instruction; none starts before its `release`.

        The third array counts predecessors that never ended: all zero unless the graph has a cycle.
        `compiled` picks the engine. By default it is the compiled one if it is loaded already or pays off for
        this graph.
        """
        if compiled is None:
            work = len(self) + len(self.source) + WORK_OF_TASK * len(self.tasks)
            compiled = work >= COMPILED_FROM or compiled_run_cycle.cache_info().currsize > 0
        tasks = self.tasks.before_the_first()
        if compiled:
            waiting, *rest = self._arrays
            arguments = (release, waiting.copy(), *rest, tasks, np.zeros_like(release))
            return compiled_run_cycle()(*arguments)  # type: ignore[no-any-return]
        waiting_list, *lists = self._lists
        engine: Callable[..., Any] = run_cycle
        tasks = Tasks(*(array.tolist() for array in tasks))
        answer = engine(release.tolist(), waiting_list.copy(), *lists, tasks, [0] * len(release))
        start, end, left = (np.array(values, dtype=np.int64) for values in answer)
        return start, end, left


def load_compiled_engine() -> None:
    """Load the compiled engine now, before many simulations."""
    compiled_run_cycle()
