"""Warm starts: a program that starts warm does what it does in a new interpreter, and starts others warm."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from warm_starts import Template

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every start is cold"),
]

SEEN = """
import os, signal, sys, threading
print(sys.argv, os.getcwd(), sys.path[:2], __name__, input())
print(os.getppid(), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())
print(sorted(os.environ.items()))
print([(stream.isatty(), stream.line_buffering) for stream in (sys.stdin, sys.stdout, sys.stderr)])
print({number: signal.getsignal(number) for number in signal.valid_signals()}, signal.pthread_sigmask(0, []))
print(threading.active_count(), sorted(os.listdir("/proc/self/fd")))
# Arrow's allocator has a thread of its own, and starts it anew after a fork.
native = {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
print(len(native - {"jemalloc_bg_thd"}))
"""
OF_TORCH = """
import torch
print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized())
"""
ENDS = {
    "": 0,
    "raise SystemExit": 0,
    "raise SystemExit(3)": 3,
    "raise SystemExit('no')": 1,
    "raise ValueError('no')": 1,
    "import os; os._exit(4)": 4,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT,
    "import atexit; atexit.register(print, 'late')": 0,
    "import threading; threading.Timer(0.1, print, ('later',)).start()": 0,
}
MODULES = "import sys; print(len({'torch', 'weft.training.loop'} & set(sys.modules)))"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {MODULES!r}], check=True)"

ASKS = f"""
import subprocess, sys
from warm_starts import Template
start = [sys.executable, "-c", {MODULES!r}]
subprocess.run(start, check=True)
with Template.start() as template, template.warming():
    subprocess.run(start, check=True)
"""


def asked(*words: str, **choices: object) -> tuple[int, str, list[str]]:
    """Exit code, output, and the last line of the errors of a process of Python."""
    given = {"input": "yes\n", "text": True, "capture_output": True, "timeout": 120, **choices}
    ended = subprocess.run([sys.executable, *words], check=False, **given)  # type: ignore[call-overload]
    return ended.returncode, ended.stdout, ended.stderr.splitlines()[-1:]


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """Where tests run in the background of a shell, a new interpreter would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("choices", [{}, {"start_new_session": True}, {"cwd": "/"}])
def test_a_program_sees_what_it_sees_in_a_new_interpreter(
    template: Template, tmp_path: Path, choices: dict[str, object]
) -> None:
    environment = {"LANG": "C.UTF-8", "PYTHONPATH": str(tmp_path), "WORDS": "b c"}
    choices = {"env": environment, **choices}
    with heeding_ctrl_c():
        cold, cold_lines, _ = asked("-c", SEEN, "a", "b c", **choices)
    with template.warming(starts_others="cold"):
        warm, warm_lines, _ = asked("-c", SEEN, "a", "b c", **choices)
    assert warm_lines.splitlines() == cold_lines.splitlines()
    assert warm == cold == 0


@pytest.mark.parametrize("threads", ["1", "1000", None])
def test_torch_has_the_threads_of_a_new_interpreter(
    template: Template, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    cold = asked("-c", OF_TORCH)
    with template.warming():
        assert asked("-c", OF_TORCH) == cold
    assert cold[0] == 0


def test_random_numbers_are_those_of_no_other_process(template: Template) -> None:
    drawn = (
        "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(()).item())"
    )
    with template.warming():
        one, other = (asked("-c", drawn)[1].split() for _ in range(2))
    assert set(one).isdisjoint(other)


@pytest.mark.parametrize(("program", "exit_code"), ENDS.items())
def test_a_program_ends_as_in_a_new_interpreter(template: Template, program: str, exit_code: int) -> None:
    with heeding_ctrl_c():
        cold = asked("-c", program)
    with template.warming():
        assert asked("-c", program) == cold
    assert cold[0] == exit_code


def test_a_module_runs_with_its_folder_first_in_the_path(template: Template, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import sys; print(sys.argv, sys.path[0], __name__, __file__)")
    cold = asked("-m", "told", "a", cwd=tmp_path)
    with template.warming():
        assert asked("-u", "-m", "told", "a", cwd=tmp_path) == cold
    assert cold[0] == 0


@pytest.mark.parametrize(
    ("words", "unbuffered"), [(("-c",), False), (("-u", "-c"), True)], ids=["buffered", "unbuffered"]
)
def test_arguments_of_python_and_of_the_program_are_told_apart(
    template: Template, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], unbuffered: bool
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import sys; print(sys.argv, sys.stdout.write_through)"
    with template.warming():
        told = asked(*words, program, "-u", "-m")
    assert told == (0, f"['-c', '-u', '-m'] {unbuffered}\n", [])


def test_what_a_template_does_not_know_starts_cold(template: Template, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(MODULES)
    with template.warming():
        assert asked(str(tmp_path / "told.py"), "-c", "a") == (0, "0\n", [])
        assert asked("-X", "dev", "-c", MODULES) == (0, "0\n", [])
        assert asked("-c", MODULES, process_group=0) == (0, "0\n", [])
        assert asked("-c", MODULES, preexec_fn=os.getpid) == (0, "0\n", [])


def test_a_template_that_has_ended_is_told() -> None:
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with line, Template(line).warming(), ThreadPoolExecutor(1) as beside:
        beside.submit(lambda: (other.recv(1), other.close()))
        with pytest.raises(RuntimeError, match="has ended"):
            asked("-c", "")


def test_what_starts_warm_starts_others_warm_unless_told_otherwise(template: Template) -> None:
    assert asked("-c", MODULES) == (0, "0\n", [])
    with template.warming():
        assert asked("-c", STARTS) == (0, "2\n", [])
    with template.warming(starts_others="cold"):
        assert asked("-c", STARTS) == (0, "0\n", [])


def test_a_copy_may_start_others_as_its_code_asks(template: Template) -> None:
    with template.warming(starts_others="as asked"):
        assert asked("-c", ASKS) == (0, "0\n2\n", [])


def test_descriptors_are_passed_under_their_numbers(template: Template) -> None:
    pairs = [os.pipe() for _ in range(3)]
    writers = [writer for _, writer in pairs]
    with template.warming():
        told = asked("-c", f"import os; [os.write(one, b'%d' % one) for one in {writers}]", pass_fds=writers)
    assert told == (0, "", [])
    assert [int(os.read(reader, 9)) for reader, _ in pairs] == writers
    for descriptor in (one for pair in pairs for one in pair):
        os.close(descriptor)


def test_a_terminal_is_one(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    mine, theirs = pty.openpty()
    with template.warming():
        subprocess.run(
            [sys.executable, "-c", "import sys; print(sys.stdout.isatty(), sys.stdout.line_buffering)"],
            stdout=theirs,
            check=True,
        )
    assert os.read(mine, 100).split() == [b"True", b"True"]
    os.close(mine)
    os.close(theirs)


def test_a_copy_and_its_template_end_with_the_process_that_started_them(template: Template) -> None:
    sleeps = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); print(1); input()"
    with (
        template.warming(),
        subprocess.Popen(
            [sys.executable, "-u", "-c", sleeps], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        process.kill()
    # The copy reads the end of its input, its template that of its line.
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
