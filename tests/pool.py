"""One pool of worker processes per test session: torch is imported once for all of them (`warm_starts`), and
process groups are made per case.

    def program(rank, world_size, argument): ...

    def test_it(worker_pool):
        results = worker_pool.run(program, argument, ranks=2)

The function must live at the top level of a file; workers import that file by its path.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from warm_starts import Template

MAX_RANKS = 8
TIMEOUT_S = 90.0
GRACE_S = 3.0
SERVE = "import sys, pool; pool.serve(int(sys.argv[1]))"


class TensorPickler(pickle.Pickler):
    """Writes tensors as their bytes: in shared memory, each needs a descriptor and a connection."""

    def reducer_override(self, given: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(given, torch.Tensor):
            return NotImplemented
        flat = given.detach().contiguous().flatten()
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), given.dtype, given.shape)


def _tensor(content: bytes, kind: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind).view(shape)


def _send(connection: Connection, given: object) -> None:
    written = io.BytesIO()
    TensorPickler(written).dump(given)
    connection.send_bytes(written.getbuffer())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


class RankError(AssertionError):
    """A rank of a case failed or hung; the text holds its traceback."""


class WorkerPool:
    """Up to `most_ranks` processes, started when first needed."""

    def __init__(self, template: Template, most_ranks: int = MAX_RANKS) -> None:
        self._template = template
        self._most_ranks = most_ranks
        # That of no test: workers stay for all of them.
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._store: Any = None
        self._cases = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int, timeout_s: float = TIMEOUT_S
    ) -> list[Any]:
        """Call `function(rank, ranks, *arguments)` on that many processes joined by a fresh process group.

        Returns the results in the order of the ranks.

        Raises:
            RankError: with the traceback of the first rank that failed, or the ranks that hung; the processes
                that did not answer are killed and replaced by the next case.
        """
        assert 1 <= ranks <= self._most_ranks, ranks
        self._start(ranks)
        self._cases += 1
        location = (
            str(Path(sys.modules[function.__module__].__file__ or "").resolve()),
            function.__qualname__,
        )
        for rank, (_, connection) in enumerate(self._workers[:ranks]):
            _send(connection, (location, rank, ranks, self._store.port, self._cases, arguments))
        answers, failures = self._collect(ranks, timeout_s)
        hung = sorted(set(range(ranks)) - set(answers))
        self._drop(hung)
        if failures:
            # All of them: a rank that lost its peer may say so before the peer says what went wrong.
            raise RankError("\n".join(failures))
        if hung:
            raise RankError(f"ranks {hung} did not answer within {timeout_s:g} s")
        return [answers[rank] for rank in range(ranks)]

    def close(self) -> None:
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()
        self._workers.clear()

    def _collect(self, ranks: int, timeout_s: float) -> tuple[dict[int, Any], list[str]]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:ranks])}
        answers: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    succeeded, answer = _receive(ready)
                except (EOFError, OSError):
                    succeeded, answer = False, "the process died"
                else:
                    answers[rank] = answer
                if not succeeded:
                    failures.append(f"rank {rank}: {answer}")
                    # The others may wait for the rank that failed; they get a moment to fail by themselves.
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, failures

    def _start(self, ranks: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < ranks:
            ours, theirs = Pipe()
            with self._template.warming(starts_others="cold"):
                process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=self._environment,
                )
            theirs.close()
            self._workers.append((process, ours))

    def _drop(self, ranks: Sequence[int]) -> None:
        """Kill the processes of these ranks and keep the others."""
        for rank in ranks:
            process, connection = self._workers[rank]
            process.kill()
            process.wait()
            connection.close()
        self._workers = [worker for rank, worker in enumerate(self._workers) if rank not in ranks]


def serve(descriptor: int) -> None:
    """Answer the cases that come over a connection until it is closed."""
    import torch

    connection = Connection(descriptor)
    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            location, rank, ranks, port, case, arguments = _receive(connection)
        except (EOFError, KeyboardInterrupt):
            return
        # What libraries and earlier cases have made stays: whoever collects garbage need not look through it.
        gc.freeze()
        try:
            answer = (True, _call(modules, location, rank, ranks, port, case, arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Now, because a frozen cycle would keep its process groups, whose threads never rest without peers.
        gc.collect()
        _send(connection, answer)


def _call(
    modules: dict[str, ModuleType],
    location: tuple[str, str],
    rank: int,
    ranks: int,
    port: int,
    case: int,
    arguments: tuple[Any, ...],
) -> Any:
    import torch.distributed as dist

    function: Any = _load(modules, location[0])
    for name in location[1].split("."):
        function = getattr(function, name)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.PrefixStore(f"case-{case}", dist.TCPStore("127.0.0.1", port, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    # A rank that ends at once would leave while slower ones still connect to it.
    dist.barrier()
    try:
        return function(rank, ranks, *arguments)
    finally:
        dist.destroy_process_group()


def _load(modules: dict[str, ModuleType], path: str) -> ModuleType:
    if path not in modules:
        name = f"worker_{len(modules)}_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]
