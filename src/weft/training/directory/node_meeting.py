"""The meeting of a job's nodes in its store, before any of them reads the run.

The first rank of each node speaks for it. Versions are compared. Each node writes a mark into its run
directory and looks for those of others. The node of rank 0 offers the run. An elastic run is offered by the
node with the newest plans: rank 0's may have just come. Nodes without the offered directory get
copies of the files that a start reads. Nothing is pickled.

    token                 rank 0's name for this meeting
    here/LEADER           a node's host, versions and number of ranks
    offerer               the first rank of the node that offers the run
    offer                 its files, or what is refused
    run/LEADER            the first leader whose mark the node sees in its run directory
    runs                  what is refused so far
    checkpoints/LEADER    the same, in the directory of its checkpoints
    verdict               all folders and the number of ranks in use, or what is refused
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

import weft
from weft.describe.run_file import RUN_ID, load_run
from weft.errors import InputError, RunError, Violation
from weft.files import write_whole
from weft.run.launch.nodes import JobNodes, RankPlace
from weft.run.launch.worker_start import START_TIMEOUT_S, job_store
from weft.training.checkpoint.manifest import CHECKPOINTS
from weft.training.directory.plans_at_hand import files_at_hand, forget_at_hand, is_elastic, prepared_ns
from weft.training.directory.run_directory import PLAN_FILES, STARTING_FILES, RunDirectory

_MARK = ".weft-node-"
_PREFIX = "weft nodes"
_HEARING_S = 5.0
# The keys of the exit code of a job with spares, and of the number of spares that know it.
_ENDED, _RELEASED = "ended", "released"
_SPARE_POLL_S = 1.0


# Returns the ranks of a plan at hand, from the run directory and the ranks that were started.
ChoosePlan = Callable[[RunDirectory, int], int]


class MetNodes(NamedTuple):
    """The store of a job and its nodes.

    Attributes:
        ranks: the number of ranks that its plan uses.
        spares: the number of those that wait beside them.
    """

    store: dist.Store
    nodes: JobNodes
    ranks: int
    spares: int

    @property
    def is_spare(self) -> bool:
        """True if this rank is beyond those of the plan, and waits until they end."""
        return self.nodes.rank >= self.ranks

    def wait_as_spare(self) -> int:
        """Wait until the ranks of the plan have ended, and return their exit code.

        Raises:
            RunError: if the store ends before, with the node that holds it.
        """
        try:
            while not self.store.check([_ENDED]):
                time.sleep(_SPARE_POLL_S)
            exit_code = int(self.store.get(_ENDED))
            self.store.add(_RELEASED, 1)
            return exit_code
        except (dist.DistError, RuntimeError):
            raise RunError(f"rank {self.nodes.rank} was a spare, and the job's store is gone") from None

    def release_spares(self, exit_code: int) -> None:
        """Tell spares that the job has ended; rank 0 does, and keeps the store until they know."""
        if self.nodes.rank == 0 and self.spares:
            self.store.set(_ENDED, str(exit_code))
            _wait_for(self.store, _RELEASED, self.spares)


def meet_nodes(run_dir: Path, choose: ChoosePlan, timeout_s: float = START_TIMEOUT_S) -> MetNodes | None:
    """Meet the other nodes of the job; every rank calls it.

    None if the job has one node, and no plan for other numbers of nodes is at hand. Else `choose` returns the
    ranks of the plan at hand that so many ranks use.

    Raises:
        InputError: on every rank, if versions differ, or the directory of a node holds another run.
        RunError: if a node does not come within `timeout_s`.
    """
    place = RankPlace.of()
    if place.local_ranks == place.world_size and not is_elastic(RunDirectory(run_dir)):
        return None
    with _named(place, timeout_s):
        store = job_store(place.rank, place.world_size, timedelta(seconds=timeout_s))
        nodes, ranks = _Meeting(dist.PrefixStore(_PREFIX, store), run_dir, place, choose).hold()
        return MetNodes(store, nodes, ranks, place.world_size - ranks)


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

    def __init__(self, store: dist.Store, run_dir: Path, place: RankPlace, choose: ChoosePlan) -> None:
        self._store, self._run_dir, self._place, self._choose = store, run_dir, place, choose

    def hold(self) -> tuple[JobNodes, int]:
        rank = self._place.rank
        if self._place.local_rank:
            return self._heard()
        if rank == 0:
            self._put("token", uuid4().hex)
        with self._marked(self._run_dir) as problem:
            self._put(f"here/{rank}", _here(self._place, problem, RunDirectory(self._run_dir)))
            if rank == 0:
                self._put("offerer", self._offerer())
            if rank == self._get("offerer"):
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
                    self._put(f"checkpoints/{rank}", min(self._seen(checkpoints)))
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

    def _seen(self, folder: Path) -> set[int]:
        """Return the first ranks of the nodes whose marks are in a folder."""
        return {int(one.name.rpartition("-")[2]) for one in folder.glob(f"{self._mark}-*")}

    @cached_property
    def _nodes(self) -> dict[int, _Here]:
        """All nodes by their first ranks, which rise; the first use waits for them."""
        found: dict[int, _Here] = {}
        leader = 0
        while leader < self._place.world_size:
            found[leader] = _Here(*self._get(f"here/{leader}"))
            leader += found[leader].local_ranks
        return found

    def _offerer(self) -> int:
        """Return, on rank 0, the first rank of the node that offers the run."""
        own = RunDirectory(self._run_dir)
        if (own.path / PLAN_FILES[0]).exists() and not is_elastic(own):
            return 0  # others may have the plans of a former run file
        return max(self._nodes, key=lambda one: (self._nodes[one].prepared_ns, -one))

    def _offer(self) -> None:
        """Offer the files of the run, once all nodes are here and have the same versions."""
        here = [*self._nodes.values()]
        problems = [Violation(one.host, one.problem) for one in here if one.problem] + _other_versions(here)
        directory, files, ranks = RunDirectory(self._run_dir), dict[str, str](), self._place.world_size
        elastic, lasting = is_elastic(directory), True
        if not problems:
            try:
                ranks = self._choose(directory, ranks) if elastic else ranks
                files = _files(directory)
                # Else the checkpoints of a lost node are lost with it.
                lasting = not elastic or load_run(self._run_dir / "run.toml").checkpoint.url is not None
            except InputError as error:
                problems = list(error.violations)
        # Where the link of the checkpoints leads to, if they are elsewhere.
        link = self._run_dir / CHECKPOINTS
        elsewhere = str(link.readlink()) if link.is_symlink() else None
        offer = {"files": files, "checkpoints": elsewhere, "lasting": lasting, "ranks": ranks}
        self._put("offer", {"refused": [astuple(one) for one in problems], **offer})

    def _take_part(self) -> tuple[int, list[Violation]]:
        """Return whose run directory the node sees; take the files if it is the first to see its own."""
        offer, offerer, rank = self._get("offer"), self._get("offerer"), self._place.rank
        if offer["refused"]:
            return rank, []
        seen = self._seen(self._run_dir)
        if rank != min(seen) or offerer in seen:
            return min(seen), []
        if not offer["lasting"]:
            # Any node may be the first one of the next start.
            where, host = f"{socket.gethostname()}: {self._run_dir}", self._nodes[offerer].host
            hint = "a directory that all nodes see, or a URL as checkpoint.directory: run.min_nodes needs one"
            return rank, [Violation(where, f"{host} has another directory", hint)]
        return rank, _take(self._run_dir, offer, f"rank {offerer}")

    def _judge_runs(self) -> None:
        told = [self._get(f"run/{leader}") for leader in self._nodes]
        self._put("runs", [*self._get("offer")["refused"], *(one for _, refused in told for one in refused)])

    def _judge(self) -> None:
        refused = self._get("runs")
        folder_of = {leader: self._get(f"run/{leader}")[0] for leader in self._nodes}
        seen = {} if refused else {leader: self._get(f"checkpoints/{leader}") for leader in folder_of}
        offer = self._get("offer")
        elsewhere = offer["checkpoints"]
        if elsewhere is not None and len(set(seen.values())) > 1:
            hosts = (self._nodes[leader].host for leader, whose in seen.items() if whose)
            problem = f"{', '.join(hosts)} and rank 0's node see other folders at {elsewhere}"
            refused = [astuple(Violation("checkpoint.directory", problem, "a folder that all nodes share"))]
        found = {"refused": refused, "run": folder_of, "checkpoints": seen, "ranks": offer["ranks"]}
        self._put("verdict", found)

    def _heard(self) -> tuple[JobNodes, int]:
        verdict = self._get("verdict")
        self._store.add("heard", 1)
        if verdict["refused"]:
            if self._place.rank == 0:
                # The store may end with this process.
                _wait_for(self._store, "heard", self._place.world_size)
            raise InputError([Violation(*fields) for fields in verdict["refused"]])
        ranks = int(verdict["ranks"])
        runs, checkpoints = (
            {int(leader): folder for leader, folder in verdict[name].items() if int(leader) < ranks}
            for name in ("run", "checkpoints")
        )
        here = {leader: self._nodes[leader] for leader in sorted(runs)}
        local_ranks = {leader: min(one.local_ranks, ranks - leader) for leader, one in here.items()}
        hosts = {leader: one.host for leader, one in here.items()}
        return JobNodes.of(self._place.rank, local_ranks, runs, checkpoints, hosts), ranks

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def _wait_for(store: dist.Store, key: str, count: int) -> None:
    """Wait until so many ranks have counted under a key, or for some seconds."""
    ends_s = time.monotonic() + _HEARING_S
    while store.add(key, 0) < count and time.monotonic() < ends_s:
        time.sleep(0.05)


class _Here(NamedTuple):
    """A node that has come.

    Attributes:
        problem: what is wrong with its run directory, or an empty text.
        prepared_ns: as of `plans_at_hand`.
    """

    host: str
    local_ranks: int
    problem: str
    versions: Mapping[str, str]
    prepared_ns: int


def _here(place: RankPlace, problem: str, directory: RunDirectory) -> _Here:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    versions = {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "NCCL": nccl,
    }
    return _Here(socket.gethostname(), place.local_ranks, problem, versions, prepared_ns(directory))


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
    *plans, prepared = files_at_hand(directory)
    # The time comes last, so that a node which was killed in between does not offer them.
    names = [RUN_ID, *plans, *STARTING_FILES, prepared]
    return {name: (path / name).read_text(encoding="utf-8") for name in names if (path / name).exists()}


def _take(run_dir: Path, offer: Mapping[str, Any], offerer: str) -> list[Violation]:
    """Write the offered files of the run, unless another run has this directory."""
    where, files, checkpoints = f"{socket.gethostname()}: {run_dir}", offer["files"], offer["checkpoints"]
    directory = RunDirectory(run_dir)
    known, plan = (_text_of(run_dir / name) for name in (RUN_ID, PLAN_FILES[0]))
    if known != files[RUN_ID] and (known is not None or plan is not None):
        return [Violation(where, f"holds another run than {offerer}'s directory", "another directory")]
    if any(_text_of(run_dir / name) != files.get(name) for name in files_at_hand(directory)):
        forget_at_hand(directory)
    # The others are of the plan that this node had.
    outdated = PLAN_FILES[1:] if plan != files[PLAN_FILES[0]] else ()
    try:
        for name in (*outdated, *(one for one in STARTING_FILES if one not in files)):
            (run_dir / name).unlink(missing_ok=True)
        for name, text in files.items():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(run_dir / name, text)
        if checkpoints is not None:
            directory.link_checkpoints(Path(checkpoints))
    except OSError as error:
        return [Violation(where, f"cannot be written: {error.strerror}")]
    except InputError as error:
        return [replace(one, where=f"{socket.gethostname()}: {one.where}") for one in error.violations]
    return []


def _text_of(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
