"""Processes of Python that start warm: copies of a template that has imported weft and torch already.

    with Template.start() as template, template.warming():
        subprocess.run([sys.executable, "-m", "weft.cli.main", "runs"])

An import of weft's runtime takes five seconds of a core, a copy (fork) hundredths of one. A template runs no
thread and no code of a test. To the process that asks for it, a copy is like any other process that it
starts: its own child, with the arguments, streams, folder, environment, session and signal handlers of a new
interpreter. It ends with the same exit code or signal. Only its modules are there already, so a test of
imports starts cold.

A copy has its own template, made before its program begins, so it starts other processes warm, too.

Only Linux gives a process the children of others. Elsewhere every start is cold.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module, invalidate_caches
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from installing import forget_installed

from weft.bundles import own_runtimes

PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "weft.cli.plans",
    "weft.cli.runs",
    "weft.run.launch.agent",
    "weft.run.runtime",
    "weft.run.stage.families.decoder",
    "weft.run.stage.families.gpt",
    "weft.training.evaluation.held_out",
    "weft.training.loop",
    "weft.training.session",
)
FOLDER = str(Path(__file__).parent)
MAIN = f"import sys; sys.path.insert(0, {FOLDER!r}); import warm_starts; warm_starts.main(int(sys.argv[1]))"
MOST_BYTES = 1 << 18
LOOK_S = 0.0005
_PR_SET_CHILD_SUBREAPER = 36
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_execute_child: Any = vars(subprocess.Popen)["_execute_child"]


@dataclass(frozen=True)
class Start:
    """One start: the arguments of Python, and all that a process inherits.

    Attributes:
        descriptors: the numbers of its open descriptors, its streams first.
        starts_others: whether it has its own template.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    new_session: bool
    starts_others: bool


@dataclass(frozen=True)
class Template:
    """The line to a template process, a child of this one; None where every start is cold."""

    line: socket.socket | None

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[Template]:
        """A template until the end of the block, or of this process."""
        if sys.platform != "linux":
            yield cls(None)
            return
        ours, theirs = _line()
        with tempfile.TemporaryFile() as errors:
            template = subprocess.Popen(
                [sys.executable, "-c", MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # As in the agent: a library that looks for GPUs while it is imported must not start CUDA.
                env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
            theirs.close()
            with ours:
                yield cls(ours)
            if template.wait():
                errors.seek(0)
                raise RuntimeError(f"the template of warm starts failed: {errors.read().decode()}")

    @contextmanager
    def warming(self, *, starts_others: bool = True) -> Iterator[None]:
        """Have `subprocess` start this Python warm, and every other program as always."""
        if self.line is None:
            yield
            return
        line = self.line

        def execute_child(popen: Any, *given: Any) -> None:
            asked = signature(_execute_child).bind(popen, *given).arguments
            if not _is_python(asked["args"]) or asked["preexec_fn"] is not None:
                _execute_child(popen, *given)
                return
            pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
            start = Start(
                arguments=[*map(os.fspath, asked["args"][1:])],
                folder=os.path.abspath(asked["cwd"] or "."),
                environment=dict(os.environ if asked["env"] is None else asked["env"]),
                descriptors=[0, 1, 2, *asked["pass_fds"]],
                new_session=asked["start_new_session"],
                starts_others=starts_others,
            )
            popen.pid = _copy(line, start, [*streams, *asked["pass_fds"]])
            popen._child_created = True
            popen._close_pipe_fds(*(asked[name] for name in _ENDS))

        with mock.patch.object(subprocess.Popen, "_execute_child", execute_child):
            yield


def _is_python(command: object) -> bool:
    """Whether it starts this Python with a module or with code, as `python -u -m MODULE`."""
    match command:
        case [sys.executable, "-u", "-m" | "-c", _, *_] | [sys.executable, "-m" | "-c", _, *_]:
            return True
    return False


def _copy(line: socket.socket, start: Start, descriptors: Sequence[int]) -> int:
    """Have the template at the other end of the line make this process a new child; return its id."""
    reader, writer = os.pipe()
    with _adopting(), open(reader) as answer:
        socket.send_fds(line, [json.dumps(asdict(start)).encode()], [writer, *descriptors])
        os.close(writer)
        return int(answer.read())


@contextmanager
def _adopting() -> Iterator[None]:
    """Have this process inherit the children of processes below it that end."""
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main(line: int) -> NoReturn:
    """Be a template, and in each copy the program that it was started for."""
    import pyarrow

    for module in (*PRELOADED, *own_runtimes()):
        import_module(module)
    # Arrow imports pandas with the first array that it makes, where pandas is installed.
    pyarrow.array([0])
    forget_installed()
    gc.collect()
    # It stays: whoever collects garbage in a copy need not look through it.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = {"", FOLDER, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [folder for folder in sys.path if folder not in own]
    start = _serve(socket.socket(fileno=line))
    while start.starts_others:
        ours, theirs = _line()
        if os.fork():
            theirs.close()
            with Template(ours).warming(starts_others=False):
                _run(start)
        ours.close()
        start = _serve(theirs)
    _run(start)


def _serve(line: socket.socket) -> Start:
    """Make copies for the process at the other end until it ends; return in the copies only."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 64)
        if not message:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        line.close()
        start = Start(**json.loads(message))
        # The copy loses the process between as its parent, and gets the one that has asked for it.
        while os.getppid() == between:
            time.sleep(LOOK_S)
        answer, *others = descriptors
        with open(answer, "w") as asking:
            asking.write(str(os.getpid()))
        _place(others, start.descriptors)
        return start


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give open descriptors the numbers under which a process inherits them."""
    # A number may be in use by another of them.
    lifted = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(lifted, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(start: Start) -> NoReturn:
    """Do what Python does with these arguments, and end like it."""
    if start.new_session:
        os.setsid()
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = start.arguments[0] == "-u"
    _open_streams(unbuffered=unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    _renew_libraries()
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    invalidate_caches()
    try:
        _run_program(*start.arguments[unbuffered:])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _open_streams(*, unbuffered: bool) -> None:
    """Open Python's streams anew: the descriptors are others now."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, "strict", unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace", unbuffered)  # type: ignore[misc]


def _writer(descriptor: int, errors: str, unbuffered: bool) -> TextIOWrapper:
    return TextIOWrapper(
        open(descriptor, "wb", buffering=0 if unbuffered else -1, closefd=False),
        errors=errors,
        line_buffering=not unbuffered and (descriptor == 2 or os.isatty(descriptor)),
        write_through=unbuffered,
    )


def _renew_libraries() -> None:
    """Set what libraries have taken from the template's environment, or drawn, when they were imported."""
    import numpy as np
    import torch

    np.random.seed()
    torch.seed()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(min(cores, int(os.environ.get("OMP_NUM_THREADS", cores))))


def _run_program(what: str, program: str, *words: str) -> None:
    sys.argv = [what, *words]
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        # A copy of its own, as it is the main module.
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, "")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))


def _end(exit_code: int) -> NoReturn:
    """End like the interpreter, but do not take the modules apart, which takes a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code & 0xFF)


def _line() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
