"""The plans for other numbers of ranks in a run directory, of which each start takes one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from weft.describe.plan_file import PlanFile, load_plan, load_plan_file
from weft.errors import InputError, Violation
from weft.files import replacing
from weft.planning.planned import PlannedJob
from weft.training.directory.run_directory import AT_HAND, PLAN_FILES, PLAN_OF_ALL, RunDirectory, write_plan


def keep_at_hand(directory: RunDirectory, jobs: Mapping[int, PlannedJob]) -> None:
    """Write the plans of a run by their numbers of ranks, in place of former ones."""
    shutil.rmtree(_folder(directory), ignore_errors=True)
    for ranks, job in jobs.items():
        folder = _folder(directory) / str(ranks)
        folder.mkdir(parents=True)
        write_plan(folder, job)


def is_elastic(directory: RunDirectory) -> bool:
    """Return True if starts may have other numbers of ranks."""
    return _folder(directory).is_dir()


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
        problem = f"{ranks} ranks were started; the smallest plan at hand needs {known[0]}"
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
            _copy(_folder(directory) / str(taken) / name, directory.path / name)
        # Until now a killed start had the plan of all here.
        if taken == all_ranks:
            of_all.unlink(missing_ok=True)
    return taken


def _known(directory: RunDirectory) -> list[int]:
    """Return the numbers of ranks of the plans at hand, rising."""
    return sorted(int(one.name) for one in _folder(directory).iterdir())


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as unfinished:
        shutil.copyfile(source, unfinished)


def _folder(directory: RunDirectory) -> Path:
    return directory.path / AT_HAND
