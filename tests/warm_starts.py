"""Processes of Python that start warm: copies of a template that has imported weft and torch already.

    with Template.start() as template, template.warming():
        subprocess.run([sys.executable, "-m", "weft", "runs"])

An import of weft's runtime takes five seconds of a core, a copy (fork) hundredths of one. A template runs no
thread and no code of a test. To the process that asks for it, a copy is like any other process that it
starts: its own child, with the arguments, streams, folder, environment, session and signal handlers of a new
interpreter. It ends with the same exit code or signal. Only its modules are there already, so a test of
imports starts cold.

A copy has its own template, made before its program begins, so it starts other processes warm, too. The
runners of pytest-xdist are copies, whose tests ask for warm starts themselves.

Only Linux gives a process the children of others. Elsewhere every start is cold.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

FOLDER = str(Path(__file__).parent)
MAIN = (
    f"import sys; sys.path.insert(0, {FOLDER!r}); import warm_template; warm_template.main(int(sys.argv[1]))"
)
_PR_SET_CHILD_SUBREAPER = 36
# No process that is asked for more starts warm.
_PLAIN = {"preexec_fn": None, "executable": None, "uid": None, "gid": None, "umask": -1, "process_group": -1}
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
# How a copy starts others: warm, each of them; as its code asks for; or cold, having no template.
Starting = Literal["warm", "as asked", "cold"]
_execute_child: Any = vars(subprocess.Popen)["_execute_child"]


@dataclass(frozen=True)
class Start:
    """One start: the arguments of Python, and all that a process inherits.

    Attributes:
        descriptors: the numbers of its open descriptors, its streams first.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    new_session: bool
    starts_others: Starting


@dataclass(frozen=True)
class Template:
    """The line to a template process, a child of this one; None where every start is cold."""

    line: socket.socket | None
    # That of a copy which starts others as its code asks for.
    own: ClassVar[Template | None] = None

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[Template]:
        """A template until the end of the block, or of this process; a copy's own where it has one."""
        if cls.own is not None:
            yield cls.own
            return
        if sys.platform != "linux":
            yield cls(None)
            return
        ours, theirs = new_line()
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
    def warming(self, *, starts_others: Starting = "warm") -> Iterator[None]:
        """Have `subprocess` start this Python warm, and every other program as always."""
        if self.line is None:
            yield
            return
        line = self.line

        def execute_child(popen: Any, *given: Any) -> None:
            asked = signature(_execute_child).bind(popen, *given).arguments
            if not _is_python(asked["args"]) or any(asked[name] != plain for name, plain in _PLAIN.items()):
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
        pid = answer.read()
    if not pid:
        raise RuntimeError("the template of warm starts has ended")
    return int(pid)


@contextmanager
def _adopting() -> Iterator[None]:
    """Have this process inherit the children of processes below it that end."""
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def new_line() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
