"""The newest checkpoint of nodes whose run directories are apart.

Each directory has the files of its own ranks, and the manifest of all. An evaluation completes the checkpoint
in each of them. A start reads what its ranks need, see `weft.training.checkpoint.spread_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.errors import RunError
from weft.run.launch.nodes import JobNodes
from weft.training.checkpoint.file_copies import Copy, copy_files
from weft.training.checkpoint.manifest import (
    MANIFEST,
    digest_of,
    generation_path,
    generations,
    verify_part,
)
from weft.training.checkpoint.spread_checkpoint import remove_views, view_of
from weft.training.coordination.agreement import gather, together


def newest_among(
    directory: Path,
    nodes: JobNodes,
    group: dist.ProcessGroup | None,
    meet: Callable[[], None],
    progress: Callable[[], None],
    *,
    completes: bool,
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole among all directories, and one line per newer one skipped.

    Every rank calls it. `completes`: afterwards each directory has all its files. Else the path is that of a
    view, of which `bring` brings the tensors.

    Raises:
        RunError: on every rank, if there are checkpoints and none is whole, or a copy fails.
    """
    skipped: list[str] = []
    with together(group, meet):
        if nodes.leads_folder:
            remove_views(directory)
        own = [step for step, _ in generations(directory)] if nodes.leads_folder else []
    for step in sorted({step for steps in gather(own, group) for step in steps}, reverse=True):
        path = generation_path(directory, step)
        with together(group, meet):
            part = _part(path, progress) if nodes.leads_folder else {}
        parts = {rank: one for rank, one in enumerate(gather(part, group)) if one}
        problem = _problem(path, parts)
        if problem is None:
            if not completes:
                return view_of(path, nodes, group, meet), skipped
            copy_files(path, _missing(parts, nodes), nodes.rank, group, meet, progress)
            return path, skipped
        skipped.append(problem)
    if skipped:
        raise RunError(f"no checkpoint can be resumed: {'; '.join(skipped)}")
    return None, []


def _part(path: Path, progress: Callable[[], None]) -> dict[str, Any]:
    """Return the files that a directory has of a checkpoint, those of all, and a digest of the manifest."""
    if not path.exists():
        return {}
    try:
        names, expected = verify_part(path, lambda _: progress())
        digest = digest_of(path / MANIFEST)
    except (RunError, OSError) as error:
        return {"problem": str(error)}
    return {"names": names, "expected": sorted(expected), "manifest": digest}


def _problem(path: Path, parts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return why the parts of all directories, by their first ranks, make no whole checkpoint."""
    for rank, one in parts.items():
        if "problem" in one:
            return f"rank {rank}: {one['problem']}"
    if len({one["manifest"] for one in parts.values()}) > 1:
        return f"{path}: directories have other manifests: those of ranks {', '.join(map(str, parts))}"
    first = next(iter(parts.values()))
    held = {name for one in parts.values() for name in one["names"]}
    missing = [name for name in first["expected"] if name not in held]
    return f"{path}: no directory has {', '.join(missing)}" if missing else None


def _missing(parts: Mapping[int, Mapping[str, Any]], nodes: JobNodes) -> list[Copy]:
    """Return the copies that complete every directory; its manifest comes last."""
    writer = min(parts)
    holder = {name: rank for rank in sorted(parts, reverse=True) for name in parts[rank]["names"]}
    copies: list[Copy] = []
    for leader in nodes.folder_leaders:
        held = parts.get(leader)
        names = [name for name in holder if held is None or name not in held["names"]]
        copies += [Copy(name, holder[name], leader) for name in sorted(names)]
        if held is None:
            copies.append(Copy(MANIFEST, writer, leader))
    return copies
