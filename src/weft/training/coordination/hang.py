"""`HangWatch`: the launcher's detection of hangs, with the ranks that wait and the ranks they wait for.

It reads the ranks' slots, which show two signs of a hang. In the first, no instruction has ended for long
in a step. Yet a rank in the step has an instruction that nothing blocks. The first step of a start does not
count. In the second, nothing has ended and a rank's process does not run. This sign counts after all ranks
have opened their slots, also between two steps, as in an evaluation.

The launcher uses it; it does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.describe.run_tables.training import ReportTable
from weft.errors import RunError
from weft.program.program import NONE, Program
from weft.program.waits import Standstill, standstill
from weft.run.launch.failures import log_path
from weft.run.record.slots import Pulse, read_ended, read_last_ended, read_pulse, slots_path
from weft.training.directory.run_directory import RunDirectory

LOOK_INTERVAL_S = 1.0
# A hang lasts at least the time of this many steps, whatever the run file says.
STEPS = 10
_NAMED = 8
# Ranks whose last instructions a line tells.
_TOLD = 2


@dataclass(slots=True)
class _Rank:
    """The observed state of one rank.

    Attributes:
        pulse: the last pulse; None until the rank's slots exist.
        started: True if the pulse is of this start, not of an earlier one.
        silent_s: seconds for which the process has not run.
    """

    pulse: Pulse | None
    started: bool = False
    silent_s: float = 0.0

    def see(self, pulse: Pulse | None, elapsed_s: float) -> None:
        changed = pulse is not None and pulse != self.pulse
        self.started |= changed
        beats = self.started and pulse is not None and pulse.beats is not None
        self.silent_s = self.silent_s + elapsed_s if beats and not changed else 0.0
        self.pulse = pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """The progress of all ranks.

    Attributes:
        begun: the number of steps that each rank has begun. reached: the step that each has begun last.
        first: the first step of this start, None before any rank has begun it.
        ended: the mask of ended instructions, for each step that may be under way.
    """

    begun: tuple[int, ...]
    reached: tuple[int, ...]
    first: int | None
    ended: Mapping[int, npt.NDArray[np.bool_]]

    @property
    def amount(self) -> tuple[tuple[int, ...], int]:
        """A value that changes with the progress of any rank."""
        return self.begun, sum(int(ended.sum()) for ended in self.ended.values())

    @property
    def step(self) -> int | None:
        """The oldest step that some rank has begun and not all ranks have ended."""
        return next((step for step, ended in self.ended.items() if not ended.all()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hang:
    """A reported hang. `silence`: the only known fact is that the processes of `ranks` do not run."""

    problem: str
    step: int | None
    ranks: tuple[int, ...]
    silence: bool


class HangWatch:
    """A watch over the ranks of a run that is about to start.

    Args:
        step_s: predicted seconds of a step.
    """

    def __init__(
        self, directory: RunDirectory, program: Program, *, step_s: float, report: ReportTable
    ) -> None:
        self._directory = directory
        self._program = program
        self._report = report
        self._predicted_s = self._step_s = step_s
        self._paths = [slots_path(directory.path, rank) for rank in range(program.ranks)]
        # Slots of an earlier start stay there until a rank opens its own.
        self._ranks = [_Rank(read_pulse(path)) for path in self._paths]
        self._amount: object = None
        self._steps_begun = 0
        self._still_s = self._in_step_s = 0.0
        self._hang: _Hang | None = None
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Look at the ranks if it is time; the launcher calls it several times a second.

        Raises:
            RunError: on a hang, if the run file says so.
        """
        elapsed_s = time.monotonic() - self._looked_s
        if elapsed_s >= LOOK_INTERVAL_S:
            self._looked_s += elapsed_s
            # The bound excludes the time for which the whole job, with this process, was suspended.
            self.advance(min(elapsed_s, 2 * LOOK_INTERVAL_S))

    def advance(self, elapsed_s: float) -> None:
        """Look at the ranks, `elapsed_s` seconds after the last look.

        Raises:
            RunError: on a hang, if the run file says so.
        """
        for rank, path in zip(self._ranks, self._paths, strict=True):
            rank.see(read_pulse(path), elapsed_s)
        if not all(rank.started for rank in self._ranks):
            return
        progress = self._progress()
        self._measure_step(min(progress.begun), elapsed_s)
        if progress.amount != self._amount:
            self._end_hang()
            self._amount, self._still_s = progress.amount, 0.0
            return
        self._still_s += elapsed_s
        if self._hang is not None:
            if self._hang.silence and not self._silent():
                self._end_hang()
        elif self._still_s >= self._report.hang_after_s:
            self._hang = self._find_hang(progress)
            if self._hang is not None:
                self._tell(self._hang)

    def _progress(self) -> _Progress:
        pulses = [rank.pulse for rank in self._ranks if rank.pulse is not None]
        begun = tuple(pulse.steps_begun for pulse in pulses)
        first = next((pulse.step - pulse.steps_begun + 1 for pulse in pulses if pulse.steps_begun), None)
        if first is None:
            return _Progress(begun=begun, reached=begun, first=None, ended={})
        reached = tuple(first + count - 1 for count in begun)
        # The last transfers of the step before may still be under way.
        steps = range(max(first, min(reached) - 1), max(reached) + 1)
        recorded = {step: np.concatenate([read_ended(path, step) for path in self._paths]) for step in steps}
        if any(len(rows) != len(self._program) for rows in recorded.values()):
            # Another plan has just taken over, and this watch still has the former program.
            return _Progress(begun=begun, reached=begun, first=None, ended={})
        iteration, cycle = self._program.columns.iteration, self._program.steps_per_cycle
        # Instructions of the cycle's other steps count as ended.
        ended = {step: rows | (iteration != step % cycle) for step, rows in recorded.items()}
        return _Progress(begun=begun, reached=reached, first=first, ended=ended)

    def _measure_step(self, begun: int, elapsed_s: float) -> None:
        """Set the step's seconds to the last measured ones if they are longer than predicted."""
        self._in_step_s += elapsed_s
        if begun > self._steps_begun:
            if self._steps_begun:
                self._step_s = max(self._predicted_s, self._in_step_s / (begun - self._steps_begun))
            self._steps_begun, self._in_step_s = begun, 0.0

    def _silent(self) -> tuple[int, ...]:
        """Return the ranks with processes that have not run for `hang_after_s`."""
        limit_s = self._report.hang_after_s
        return tuple(rank for rank, seen in enumerate(self._ranks) if seen.silent_s >= limit_s)

    def _find_hang(self, progress: _Progress) -> _Hang | None:
        silent, step = self._silent(), progress.step
        limit_s = max(self._report.hang_after_s, STEPS * self._step_s)
        watched = step is not None and step != progress.first and self._still_s >= limit_s
        if step is not None and (silent or watched):
            absent = [rank for rank, reached in enumerate(progress.reached) if reached < step]
            found = standstill(self._program, progress.ended[step], absent)
            ranks = tuple(rank for rank in found.holding if rank in silent)
            if watched and not ranks:
                ranks = tuple(rank for rank in found.holding if rank not in absent)
            if ranks:
                ahead = {rank for rank, reached in enumerate(progress.reached) if reached > step}
                waiting = (ahead | found.at.keys()) - {*ranks, *absent}
                waits = f"{_named(waiting)} {_verb(waiting, 'wait')} for " if waiting else ""
                causes = self._causes(found, ranks, silent, absent)
                problem = f"step {step}: no instruction ended for {self._still_s:.0f} s: {waits}{causes}"
                problem += "".join(self._last(rank, step) for rank in ranks[:_TOLD])
                return _Hang(problem=problem, step=step, ranks=ranks, silence=False)
        if silent:
            return self._silence(silent, progress)
        return None

    def _silence(self, silent: tuple[int, ...], progress: _Progress) -> _Hang:
        silent_s = min(self._ranks[rank].silent_s for rank in silent)
        if progress.first is None:
            where = "before the first step"
        elif progress.step is None:
            where = f"after step {max(progress.reached)}"
        else:
            where = f"in step {progress.step}"
        problem = f"{_named(silent)} gave no sign of life for {silent_s:.0f} s, {where}"
        return _Hang(problem=problem, step=progress.step, ranks=silent, silence=True)

    def _causes(
        self, found: Standstill, ranks: Collection[int], silent: Collection[int], absent: Collection[int]
    ) -> str:
        """Return the text of the ranks that block the others, grouped by the instruction not ended."""
        alike: dict[tuple[str, bool], list[int]] = {}
        for rank in ranks:
            undone = "begun the step" if rank in absent else f"ended {_name(self._program, found.at[rank])}"
            alike.setdefault((undone, rank in silent), []).append(rank)
        texts = []
        for (undone, no_sign), members in alike.items():
            sign = f" and {_verb(members, 'give')} no sign of life" if no_sign else ""
            texts.append(f"{_named(members)}, which {_verb(members, 'have')} not {undone}{sign}")
        return "; and ".join(texts)

    def _last(self, rank: int, step: int) -> str:
        """Return the text of the instructions that a rank issued last and ended last; empty if unknown.

        The host of an accelerator issues much that the device has not begun.
        """
        pulse, ended = self._ranks[rank].pulse, read_last_ended(self._paths[rank], step)
        if pulse is None or pulse.issued is None:
            return ""
        issued = _name(self._program, pulse.issued)
        where = f" in step {pulse.step}" if pulse.step != step else ""
        done = "nothing in this step" if ended is None else _name(self._program, ended)
        return f"; rank {rank} issued last {issued}{where}, and ended last {done}"

    def _tell(self, hang: _Hang) -> None:
        self._directory.tell("hang", step=hang.step, problem=hang.problem, ranks=list(hang.ranks))
        if self._report.hang == "stop":
            raise RunError(f"{hang.problem} (log: {log_path(self._directory.path, hang.ranks[0])})")

    def _end_hang(self) -> None:
        if self._hang is not None:
            self._directory.tell("hang over", step=self._hang.step, after_s=self._still_s)
        self._hang = None


def _name(program: Program, row: int) -> str:
    instruction = program.instruction(row)
    text = instruction.kind.words
    if instruction.stage != NONE:
        text += f" of stage {instruction.stage}"
    if instruction.micro_batch != NONE:
        text += f", micro-batch {instruction.micro_batch}"
    return text


def _named(ranks: Collection[int]) -> str:
    first = [str(rank) for rank in sorted(ranks)[:_NAMED]]
    if len(ranks) > _NAMED:
        return f"ranks {', '.join(first)} and {len(ranks) - _NAMED} more"
    if len(ranks) == 1:
        return f"rank {first[0]}"
    return f"ranks {', '.join(first[:-1])} and {first[-1]}"


def _verb(ranks: Collection[int], plural: str) -> str:
    if len(ranks) > 1:
        return plural
    return "has" if plural == "have" else f"{plural}s"
