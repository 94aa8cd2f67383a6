"""A peer's program as a process: what it prints, and every way in which it fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peer_programs.program import PeerProgram
from weft.errors import InputError, RunError


def peer(folder: Path, text: str, **choices: object) -> PeerProgram:
    (folder / "program.py").write_text(text)
    return PeerProgram(name="peer", root=folder, **{"limit_s": 30.0, **choices})  # type: ignore[arg-type]


def ran(folder: Path, text: str, **choices: object) -> str:
    return peer(folder, text, **choices).run([str(folder / "program.py")], folder).read_text()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_it_runs_in_its_folder_without_wefts_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    text = "import os, sys; print(os.getcwd(), '/nowhere' in sys.path, os.environ['PYTHONHASHSEED'])"
    assert ran(tmp_path, text).split() == [str(tmp_path), "False", "0"]


def test_the_python_of_its_own_environment_is_taken(tmp_path: Path) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(f'#!/bin/sh\necho own\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    assert ran(tmp_path, "print('ran')").split() == ["own", "ran"]
    assert ran(tmp_path, "print('ran')", python=sys.executable).split() == ["ran"]


def test_paths_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone").mkdir()
    own = tmp_path / "clone" / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    for python in (None, "clone/.venv/bin/python", "python3"):
        peer = PeerProgram(name="peer", root=Path("clone"), python=python, limit_s=30.0)
        assert peer.run(["-c", "print('ran')"], tmp_path / "folder").read_text() == "ran\n"


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RunError, match=r"^peer: no answer within 1 s; it was ended$"):
        ran(tmp_path, text, limit_s=1.0)
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10.0
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(child)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no such model')", "exit code 1: ValueError: no such model"),
        ("import sys; sys.exit(3)", "exit code 3: it said nothing"),
        ("import os; os.abort()", "exit code -6: it said nothing"),
    ],
)
def test_one_that_fails_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RunError) as caught:
        ran(tmp_path, text)
    assert str(caught.value) == f"peer: its program failed with {said}"


def test_a_python_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^peer: /no/python cannot be started: No such file or directory$"):
        ran(tmp_path, "", python="/no/python")


def test_a_folder_that_is_no_clone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--peer: .* has no bin/peer; it must be a clone"):
        peer(tmp_path, "").require("program.py", "bin/peer")
    assert os.path.isfile(tmp_path / "program.py")


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_program_without_time_is_refused(tmp_path: Path, limit_s: float) -> None:
    with pytest.raises(InputError, match=rf"--seconds: {limit_s:g}: a program needs .* valid: 300\)$"):
        peer(tmp_path, "", limit_s=limit_s)
