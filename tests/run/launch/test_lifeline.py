"""A process tied to its parent ends with it, by the kernel or by the watching thread."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.processes

CHILD = """
import os, sys, time
from weft.run.launch.lifeline import die_with_parent, watch_parent
{tie}(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


@pytest.mark.parametrize("tie", ["die_with_parent", "watch_parent"])
def test_a_child_ends_with_its_parent(tie: str) -> None:
    command = [sys.executable, "-c", PARENT, CHILD.format(tie=tie)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, _ = psutil.wait_procs([child], timeout=10)
        assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_whose_parent_is_already_gone_ends_at_once() -> None:
    script = "from weft.run.launch.lifeline import die_with_parent; die_with_parent(2**22); print('alive')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (1, b"")
