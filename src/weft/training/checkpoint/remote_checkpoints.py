"""Checkpoints of a run in a `RemoteStorage`: copied there by each save, and brought back if newer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from weft.errors import RunError
from weft.files import replacing
from weft.run.launch.nodes import JobNodes
from weft.training.checkpoint.manifest import MANIFEST, digest_of, generation_path, read_manifest
from weft.training.checkpoint.remote_storage import HISTORY, RemoteStorage, place_of
from weft.training.coordination.agreement import from_first_rank, gather, together


class WaitingRanks(NamedTuple):
    """The ranks that read or write a checkpoint together, and how they wait for each other."""

    nodes: JobNodes
    group: dist.ProcessGroup | None
    meet: Callable[[], None]
    progress: Callable[[], None]


def copy_to_storage(
    storage: RemoteStorage,
    directory: Path,
    step: int,
    names: Collection[str],
    keep: int,
    ranks: WaitingRanks,
) -> None:
    """Copy a whole checkpoint to a storage, then drop older ones there; every rank calls it.

    Args:
        names: the files of it that this rank copies.
        keep: the number of checkpoints that stay in the storage.

    Raises:
        RunError: on every rank, if the storage fails; its earlier checkpoints stay.
    """
    path, run_dir, first = generation_path(directory, step), directory.parent, ranks.nodes.rank == 0
    with together(ranks.group, ranks.meet):
        if first:
            storage.forget(step)  # an unfinished or damaged copy
    with together(ranks.group, ranks.meet):
        for name in sorted(names):
            storage.put(path / name, place_of(step, name), ranks.progress)
    with together(ranks.group, ranks.meet):
        if first:
            for name in HISTORY:
                if (run_dir / name).exists():
                    storage.put(run_dir / name, name)
            storage.put(path / MANIFEST, place_of(step, MANIFEST))
            steps = storage.steps()
            # A run that went on before a later checkpoint could not read it.
            for old in {*(one for one in steps if one > step), *[one for one in steps if one <= step][keep:]}:
                storage.forget(old)


def bring_newest(
    directory: Path, storage: RemoteStorage, local_step: int, ranks: WaitingRanks
) -> tuple[bool, list[str]]:
    """Bring the newest whole checkpoint of a storage if it is newer than the local one; every rank calls it.

    The first rank of each folder brings a share of the files that no folder has.

    Args:
        local_step: the step of the newest whole checkpoint in the directories; -1: none.

    Returns:
        True if there was one, and one line per newer checkpoint of the storage that is damaged.

    Raises:
        RunError: on every rank, if the storage fails.
    """
    steps = list[int]()
    with together(ranks.group, ranks.meet):
        if ranks.nodes.rank == 0:
            steps = storage.steps()
    skipped = list[str]()
    for step in from_first_rank(steps, ranks.group):
        if step <= local_step:
            break
        damage = _bring(generation_path(directory, step), step, storage, ranks)
        if not damage:
            return True, skipped
        skipped.append(damage)
    return False, skipped


def _bring(path: Path, step: int, storage: RemoteStorage, ranks: WaitingRanks) -> str:
    """Bring what no folder has of a checkpoint; return what is damaged in the storage, or an empty text."""
    leads, leaders = ranks.nodes.leads_folder, ranks.nodes.folder_leaders
    manifest, expected, held, damage = b"", dict[str, tuple[int, str]](), list[str](), ""
    with together(ranks.group, ranks.meet):
        if leads:
            storage.get(place_of(step, MANIFEST), path / MANIFEST, ranks.progress)
            try:
                expected = read_manifest(path)
                held = _keep_whole(path, expected, ranks.progress)
            except RunError:
                damage = f"{storage.url}/{place_of(step, MANIFEST)}: damaged"
            manifest = (path / MANIFEST).read_bytes()
            # Until all files are here, the folder is torn.
            (path / MANIFEST).unlink()
    present = {name for names in gather(held, ranks.group) for name in names}
    with together(ranks.group, ranks.meet):
        missing = [name for name in sorted(expected) if name not in present]
        share = missing[leaders.index(ranks.nodes.rank) :: len(leaders)] if leads else ()
        for name in share:
            storage.get(place_of(step, name), path / name, ranks.progress)
            if not _is_whole(path / name, expected[name], ranks.progress):
                damage = f"{storage.url}/{place_of(step, name)}: damaged: its SHA-256 is not the manifest's"
    damages = [one for one in gather(damage, ranks.group) if one]
    if damages:
        return str(damages[0])
    with together(ranks.group, ranks.meet):
        if leads:
            with replacing(path / MANIFEST) as unfinished:
                unfinished.write_bytes(manifest)
    return ""


def _keep_whole(
    path: Path, expected: Mapping[str, tuple[int, str]], progress: Callable[[], None]
) -> list[str]:
    """Return the files of a checkpoint that a folder has whole; remove its others, except the manifest."""
    whole = list[str]()
    for file in sorted(path.iterdir()):
        if file.name in expected and _is_whole(file, expected[file.name], progress):
            whole.append(file.name)
        elif file.name != MANIFEST:
            file.unlink()
    return whole


def _is_whole(file: Path, entry: tuple[int, str], progress: Callable[[], None]) -> bool:
    size, digest = entry
    return file.stat().st_size == size and digest_of(file, lambda _: progress()) == digest
