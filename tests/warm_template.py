"""The template of warm starts, and what its copies do (see `warm_starts`)."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from importlib import import_module, invalidate_caches
from io import TextIOWrapper
from typing import NoReturn

import numpy as np
import pyarrow
import torch
from installing import forget_installed
from warm_starts import FOLDER, Start, Template, new_line

from weft.bundles import own_runtimes

PRELOADED = (
    "sklearn.datasets",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "weft.cli.plans",
    "weft.cli.runs",
    "weft.run.launch.agent",
    "weft.run.runtime",
    "weft.run.stage.families.decoder",
    "weft.run.stage.families.gpt",
    "weft.run.stage.split_backward",
    "weft.training.evaluation.held_out",
    "weft.training.loop",
    "weft.training.session",
)
MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 64
LOOK_S = 0.0005


def main(line: int) -> NoReturn:
    """Be a template, and in each copy the program that it was started for."""
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
    while start.starts_others != "cold":
        ours, theirs = new_line()
        if os.fork():
            theirs.close()
            if start.starts_others == "as asked":
                Template.own = Template(ours)
                _run(start)
            with Template(ours).warming(starts_others="cold"):
                _run(start)
        ours.close()
        start = _serve(theirs)
    _run(start)


def _serve(line: socket.socket) -> Start:
    """Make copies for the process at the other end until it ends; return in the copies only."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_DESCRIPTORS)
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
    np.random.seed()
    torch.seed()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(min(cores, int(os.environ.get("OMP_NUM_THREADS") or cores)))


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
