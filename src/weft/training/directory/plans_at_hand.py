"""The plans for other numbers of ranks in a run directory, of which each start takes one.

at-hand/RANKS/plan.json ...     the files of each plan
at-hand/prepared                when they were made: nodes with directories apart take the newest ones
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from weft.describe.plan_file import PlanFile, load_plan, load_plan_file
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.files import replacing, write_whole
from weft.planning.planned_job import PlannedJob
from weft.training.directory.run_directory import AT_HAND, PLAN_FILES, PLAN_OF_ALL, RunDirectory, write_plan

_PREPARED = "prepared"


def keep_at_hand(directory: RunDirectory, jobs: Mapping[int, PlannedJob]) -> None:
    """Write the plans of a run by their numbers of ranks, in place of former ones."""
    forget_at_hand(directory)
    for ranks, job in jobs.items():
        folder = _folder(directory) / str(ranks)
        folder.mkdir(parents=True)
        write_plan(folder, job)
    if jobs:
        write_whole(_folder(directory) / _PREPARED, f"{time.time_ns()}\n")


def is_elastic(directory: RunDirectory) -> bool:
    """Return True if starts may have other numbers of ranks."""
    return _folder(directory).is_dir()


def prepared_ns(directory: RunDirectory) -> int:
    """Return the time at which the plans at hand were made; 0: there are none."""
    path = _folder(directory) / _PREPARED
    return int(path.read_text(encoding="utf-8")) if path.exists() else 0


def files_at_hand(directory: RunDirectory) -> list[str]:
    """Return the files that other nodes need to start with any of the plans; the last one tells their age.

    They are relative to the directory.
    """
    names = [*(f"{ranks}/{PLAN_FILES[0]}" for ranks in _known(directory)), _PREPARED]
    return [f"{AT_HAND}/{name}" for name in names]


def forget_at_hand(directory: RunDirectory) -> None:
    """Remove the plans at hand."""
    shutil.rmtree(_folder(directory), ignore_errors=True)


def known_plans(directory: RunDirectory) -> dict[int, PlanFile]:
    """Return the plans at hand by their numbers of ranks, the largest first."""
    paths = _folder(directory).glob(f"*/{PLAN_FILES[0]}")
    found = {int(path.parent.name): load_plan_file(path) for path in paths}
    return dict(sorted(found.items(), reverse=True))


def largest_at_hand(directory: RunDirectory, ranks: int) -> int:
    """Return the number of ranks of the largest plan for so many.

    Raises:
        InputError: if even the smallest plan needs more ranks.
    """
    known = _known(directory)
    if ranks < known[0]:
        problem = f"started with {counted(ranks, 'rank')}; the smallest plan at hand needs {known[0]}"
        raise InputError(Violation(str(directory.path), problem))
    return max(one for one in known if one <= ranks)


def take_at_hand(directory: RunDirectory, ranks: int) -> int:
    """Have the largest plan for so many ranks as the plan of the run, and return its number of ranks.

    While some nodes are missing, the plan of all is kept beside it.

    Raises:
        InputError: as `largest_at_hand`, or if the present plan cannot be read.
    """
    taken, all_ranks = largest_at_hand(directory, ranks), _known(directory)[-1]
    if taken != load_plan(directory.path / PLAN_FILES[0]).ranks:
        of_all = directory.path / PLAN_OF_ALL
        if taken != all_ranks:
            _copy(_folder(directory) / str(all_ranks) / PLAN_FILES[0], of_all)
        # `plan.json` comes last, as in `RunDirectory.turn`.
        for name in reversed(PLAN_FILES):
            source = _folder(directory) / str(taken) / name
            if source.exists():
                _copy(source, directory.path / name)
            else:
                # A node that has its plans from another one has no predicted times.
                (directory.path / name).unlink(missing_ok=True)
        # Until now a killed start had the plan of all here.
        if taken == all_ranks:
            of_all.unlink(missing_ok=True)
    return taken


def _known(directory: RunDirectory) -> list[int]:
    """Return the numbers of ranks of the plans at hand, rising."""
    return sorted(int(one.parent.name) for one in _folder(directory).glob(f"*/{PLAN_FILES[0]}"))


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as unfinished:
        shutil.copyfile(source, unfinished)


def _folder(directory: RunDirectory) -> Path:
    return directory.path / AT_HAND
