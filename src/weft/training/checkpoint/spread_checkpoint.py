"""Views of a checkpoint whose files are spread over several nodes.

    checkpoints/.reading/step-00000100/
      shard-00001-model-...    a link to a file that this folder has
      shard-00002-model-...    a file of another node: its header, and holes in place of its tensors
      state.json

The headers name all tensors, so the readers of checkpoints read a view as they read a whole checkpoint.
`bring` fills in the tensors that the ranks of a folder ask for, under any plan. Holes take no room on disk.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.files import naming
from weft.run.launch.nodes import JobNodes
from weft.training.checkpoint.file_copies import Copy, Span, copy_files
from weft.training.checkpoint.manifest import MANIFEST
from weft.training.coordination.agreement import gather, together

_VIEWS = ".reading"
_TENSORS = ".safetensors"
# A file of tensors begins with the length of its header.
_LENGTH_BYTES = 8


def view_of(path: Path, nodes: JobNodes, group: dist.ProcessGroup | None, meet: Callable[[], None]) -> Path:
    """Make a view of a checkpoint in each folder, and return its path; every rank calls it.

    Raises:
        RunError: on every rank, if a file cannot be read or written.
    """
    view = path.parent / _VIEWS / path.name
    with together(group, meet):
        own = {one.name: _shown(one) for one in _files(path)} if nodes.leads_folder else {}
    of_all = {name: shown for part in gather(own, group) for name, shown in part.items()}
    with together(group, meet):
        if nodes.leads_folder:
            view.mkdir(parents=True)
            for name, (size, content) in of_all.items():
                if name in own:
                    (view / name).symlink_to(Path("..", "..", path.name, name))
                else:
                    _write_with_holes(view / name, size, content.encode())
    return view


def remove_views(directory: Path) -> None:
    """Remove the views in a folder of checkpoints; only its first rank calls it."""
    shutil.rmtree(directory / _VIEWS, ignore_errors=True)


def is_view(path: Path) -> bool:
    return path.parent.name == _VIEWS


def bring(
    view: Path,
    tensors: Collection[str],
    nodes: JobNodes,
    group: dist.ProcessGroup | None,
    meet: Callable[[], None],
    progress: Callable[[], None],
) -> None:
    """Fill a view with the tensors that this rank reads, by name; every rank calls it.

    Raises:
        RunError: on every rank, if a file cannot be read or written, or changes on the way.
    """
    with together(group, meet):
        files = _files(view)
        lacking = [one for one in files if one.suffix == _TENSORS and not one.is_symlink()]
        asked = {one.name: [name for name in _spans(one) if name in tensors] for one in lacking}
        held = [one.name for one in files if one.is_symlink()] if nodes.leads_folder else []
    told = gather([held, {name: found for name, found in asked.items() if found}], group)
    holder = {name: rank for rank in reversed(range(len(told))) for name in told[rank][0]}
    with together(group, meet):
        spans = {name: _spans(view / name) for name in {name for _, one in told for name in one}}
        copies = [
            Copy(name, holder[name], folder[0], _joined(sorted(spans[name][tensor] for tensor in tensors)))
            for folder in nodes.folders
            for name, tensors in sorted(_asked_together(told[rank][1] for rank in folder).items())
        ]
    copy_files(view, copies, nodes.rank, group, meet, progress)


def _asked_together(asked: Iterable[Mapping[str, Iterable[str]]]) -> Mapping[str, set[str]]:
    """Return the tensors that any rank asks for, by file."""
    found = defaultdict[str, set[str]](set)
    for name, tensors in chain.from_iterable(one.items() for one in asked):
        found[name].update(tensors)
    return found


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return rising spans, with neighbours as one."""
    borders = [index for index, (one, other) in enumerate(pairwise(spans), start=1) if sum(one) != other[0]]
    runs = pairwise([0, *borders, len(spans)])
    return tuple((spans[first][0], sum(spans[end - 1]) - spans[first][0]) for first, end in runs)


def _files(path: Path) -> list[Path]:
    found = path.iterdir() if path.exists() else ()
    return sorted(one for one in found if one.name != MANIFEST)


def _shown(path: Path) -> tuple[int, str]:
    """Return a file's size, and the text with which its copies in views begin."""
    if path.suffix != _TENSORS:
        return path.stat().st_size, path.read_text(encoding="utf-8")
    return path.stat().st_size, _header(path)


def _header(path: Path) -> str:
    with naming(path), open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")).decode()


def _write_with_holes(path: Path, size: int, content: bytes) -> None:
    with naming(path), open(path, "wb") as file:
        if path.suffix == _TENSORS:
            file.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
        file.write(content)
        file.truncate(size)


def _spans(path: Path) -> dict[str, Span]:
    """Return the bytes of each tensor in a file, by name."""
    header = _header(path)
    first, records = _LENGTH_BYTES + len(header.encode()), json.loads(header)
    found: dict[str, Any] = {
        name: one["data_offsets"] for name, one in records.items() if name != "__metadata__"
    }
    return {name: (first + start, end - start) for name, (start, end) in found.items()}
