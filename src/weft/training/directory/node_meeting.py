"""The meeting of a job's nodes in its store, before any of them reads the run.

The first rank of each node speaks for it. Versions are compared. Each node writes a mark into its run
directory and looks for those of others. Nodes without rank 0's directory get copies of the files that a start
reads. Nothing is pickled.

    token                 rank 0's name for this meeting
    here/LEADER           a node's host, versions and number of ranks
    offer                 rank 0's files, or what is refused
    run/LEADER            the first leader whose mark the node sees in its run directory
    runs                  what is refused so far
    checkpoints/LEADER    the same, in the directory of its checkpoints
    verdict               all folders, or what is refused
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

import weft
from weft.errors import InputError, RunError, Violation
from weft.files import write_whole
from weft.run.launch.nodes import JobNodes, RankPlace
from weft.run.launch.worker_start import START_TIMEOUT_S, job_store
from weft.training.checkpoint.manifest import CHECKPOINTS
from weft.training.directory.run_directory import RUN_ID, STARTING_FILES, RunDirectory

_MARK = ".weft-node-"
_PREFIX = "weft nodes"
_HEARING_S = 5.0


class MetNodes(NamedTuple):
    """The store of a job, and its nodes."""

    store: dist.Store
    nodes: JobNodes


def meet_nodes(run_dir: Path, timeout_s: float = START_TIMEOUT_S) -> MetNodes | None:
    """Meet the other nodes of the job; every rank calls it. None if the job has one node.

    Raises:
        InputError: on every rank, if versions differ, or the directory of a node holds another run.
        RunError: if a node does not come within `timeout_s`.
    """
    place = RankPlace.of()
    if place.local_ranks == place.world_size:
        return None
    with _named(place, timeout_s):
        store = job_store(place.rank, place.world_size, timedelta(seconds=timeout_s))
        meeting = _Meeting(dist.PrefixStore(_PREFIX, store), run_dir, place)
        return MetNodes(store, meeting.hold())


@contextmanager
def _named(place: RankPlace, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, RunError):
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().splitlines()[0]
        problem = f"rank {place.rank}: not all nodes met at {address} within {timeout_s:g} s: {reason}"
        raise RunError(problem) from error


class _Meeting:
    """One rank's part in the meeting."""

    def __init__(self, store: dist.Store, run_dir: Path, place: RankPlace) -> None:
        self._store, self._run_dir, self._place = store, run_dir, place

    def hold(self) -> JobNodes:
        rank = self._place.rank
        if self._place.local_rank:
            return self._heard()
        if rank == 0:
            self._put("token", uuid4().hex)
        with self._marked(self._run_dir) as problem:
            self._put(f"here/{rank}", _here(self._place, problem))
            if rank == 0:
                self._offer()
            folder, refused = self._take_part()
            # Now every node knows where the checkpoints of its run are.
            checkpoints = self._run_dir / CHECKPOINTS
            with nullcontext("") if refused else self._marked(checkpoints) as problem:
                refused += [Violation(socket.gethostname(), problem)] if problem else []
                self._put(f"run/{rank}", [folder, [astuple(one) for one in refused]])
                if rank == 0:
                    self._judge_runs()
                if not self._get("runs"):
                    self._put(f"checkpoints/{rank}", self._first_seen(checkpoints))
                if rank == 0:
                    self._judge()
                return self._heard()

    @contextmanager
    def _marked(self, folder: Path) -> Iterator[str]:
        """Have a mark of this node in a folder; yield why it cannot be written, or an empty text.

        A folder that is made for the mark goes with it, unless it has files by then.
        """
        mark, made, problem = folder / f"{self._mark}-{self._place.rank}", not folder.exists(), ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            problem = f"{folder}: cannot be written: {error.strerror}"
        try:
            yield problem
        finally:
            with suppress(OSError):
                mark.unlink()
                if made:
                    folder.rmdir()

    @property
    def _mark(self) -> str:
        return f"{_MARK}{self._get('token')}"

    def _first_seen(self, folder: Path) -> int:
        """Return the first rank of the nodes whose marks are in a folder."""
        return min(int(one.name.rpartition("-")[2]) for one in folder.glob(f"{self._mark}-*"))

    def _offer(self) -> None:
        """Offer the files of the run, once all nodes are here and have the same versions."""
        here = [_Here(*self._get(f"here/{leader}")) for leader in self._leaders()]
        problems = [Violation(one.host, one.problem) for one in here if one.problem] + _other_versions(here)
        files: dict[str, str] = {}
        if not problems:
            try:
                files = _files(RunDirectory(self._run_dir))
            except InputError as error:
                problems = list(error.violations)
        # Where the link of the checkpoints leads to, if they are elsewhere.
        link = self._run_dir / CHECKPOINTS
        elsewhere = str(link.readlink()) if link.is_symlink() else None
        refused = [astuple(one) for one in problems]
        self._put("offer", {"refused": refused, "files": files, "checkpoints": elsewhere})

    def _take_part(self) -> tuple[int, list[Violation]]:
        """Return whose run directory the node sees; take the files if it is the first to see its own."""
        offer, rank = self._get("offer"), self._place.rank
        if offer["refused"]:
            return rank, []
        folder = self._first_seen(self._run_dir)
        return folder, _take(self._run_dir, offer) if folder == rank != 0 else []

    def _judge_runs(self) -> None:
        told = [self._get(f"run/{leader}") for leader in self._leaders()]
        self._put("runs", [*self._get("offer")["refused"], *(one for _, refused in told for one in refused)])

    def _judge(self) -> None:
        refused = self._get("runs")
        folder_of = {leader: self._get(f"run/{leader}")[0] for leader in self._leaders()}
        seen = {} if refused else {leader: self._get(f"checkpoints/{leader}") for leader in folder_of}
        elsewhere = self._get("offer")["checkpoints"]
        if elsewhere is not None and len(set(seen.values())) > 1:
            hosts = (_Here(*self._get(f"here/{leader}")).host for leader, whose in seen.items() if whose)
            problem = f"{', '.join(hosts)} and rank 0's node see other folders at {elsewhere}"
            refused = [astuple(Violation("checkpoint.directory", problem, "a folder that all nodes share"))]
        self._put("verdict", {"refused": refused, "run": folder_of, "checkpoints": seen})

    def _heard(self) -> JobNodes:
        verdict = self._get("verdict")
        self._store.add("heard", 1)
        if verdict["refused"]:
            self._wait_for_all()
            raise InputError([Violation(*fields) for fields in verdict["refused"]])
        runs, checkpoints = (
            {int(leader): int(folder) for leader, folder in verdict[name].items()}
            for name in ("run", "checkpoints")
        )
        here = {leader: _Here(*self._get(f"here/{leader}")) for leader in sorted(runs)}
        return JobNodes.of(
            self._place.rank,
            {leader: one.local_ranks for leader, one in here.items()},
            runs,
            checkpoints,
        )

    def _wait_for_all(self) -> None:
        """Keep the store, which may end with this process, until all ranks have read the verdict."""
        ends_s = time.monotonic() + _HEARING_S
        while self._store.add("heard", 0) < self._place.world_size and time.monotonic() < ends_s:
            time.sleep(0.05)

    def _leaders(self) -> Iterator[int]:
        leader = 0
        while leader < self._place.world_size:
            yield leader
            leader += _Here(*self._get(f"here/{leader}")).local_ranks

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))


class _Here(NamedTuple):
    """A node that has come: its host, its number of ranks, what is wrong with its directory, its versions."""

    host: str
    local_ranks: int
    problem: str
    versions: Mapping[str, str]


def _here(place: RankPlace, problem: str) -> _Here:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    versions = {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "NCCL": nccl,
    }
    return _Here(socket.gethostname(), place.local_ranks, problem, versions)


def _other_versions(nodes: Sequence[_Here]) -> list[Violation]:
    first = nodes[0]
    return [
        Violation(
            node.host, f"has {name} {node.versions[name]}, not {known} as {first.host}", f"{name} {known}"
        )
        for node in nodes[1:]
        for name, known in first.versions.items()
        if node.versions.get(name) != known
    ]


def _files(directory: RunDirectory) -> dict[str, str]:
    """Return the content of the files that a start reads, and give the run an id."""
    directory.require()
    path, _ = directory.path, directory.run_id
    names = [name for name in (RUN_ID, *STARTING_FILES) if (path / name).exists()]
    return {name: (path / name).read_text(encoding="utf-8") for name in names}


def _take(run_dir: Path, offer: Mapping[str, Any]) -> list[Violation]:
    """Write the files of rank 0's run directory, unless another run has this one."""
    where, files, checkpoints = f"{socket.gethostname()}: {run_dir}", offer["files"], offer["checkpoints"]
    own = run_dir / RUN_ID
    known = own.read_text(encoding="utf-8") if own.exists() else None
    if known != files[RUN_ID] and (known is not None or (run_dir / "plan.json").exists()):
        return [Violation(where, "holds another run than rank 0's directory", "another directory")]
    try:
        for name in STARTING_FILES:
            if name not in files:
                (run_dir / name).unlink(missing_ok=True)
        for name, text in files.items():
            (run_dir / name).parent.mkdir(exist_ok=True)
            write_whole(run_dir / name, text)
        if checkpoints is not None:
            RunDirectory(run_dir).link_checkpoints(Path(checkpoints))
    except OSError as error:
        return [Violation(where, f"cannot be written: {error.strerror}")]
    except InputError as error:
        return [replace(one, where=f"{socket.gethostname()}: {one.where}") for one in error.violations]
    return []
