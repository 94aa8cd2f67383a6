"""Real labs: rates and quotas hold, nothing is left behind. Skipped where none can be made."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from interruptible import interruptible
from lab.clusters import mixed
from listeners import listeners

from weft.cli.main import run
from weft.describe.cluster_tables import to_toml
from weft.errors import InputError
from weft.lab.cgroups import find_controller
from weft.lab.lab import open_lab
from weft.lab.network import lab_namespaces
from weft.lab.place import VARIABLE
from weft.lab.scheme import HUB_ADDRESS

pytestmark = pytest.mark.processes

RATE = 2e7
LIMIT_S = 120.0
# What it takes to send 3 MB to an address and to hear that they came; then how much of a core spinning got.
SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    line, _ = server.accept()
    left = 3_000_000
    while left:
        left -= len(line.recv(1 << 20))
    line.sendall(b"x")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as line:
    began = time.perf_counter()
    line.sendall(bytes(3_000_000))
    line.recv(1)
    print(3_000_000 / (time.perf_counter() - began))
"""
LAUNCH = (
    "import sys; from pathlib import Path; from weft.run.launch.workers import launch_workers; "
    'launch_workers(Path(sys.argv[1]), 2, "launched")'
)
SPIN = """
import time
began = time.perf_counter()
while time.perf_counter() - began < 0.5:
    pass
print(time.process_time(), time.perf_counter() - began)
"""


@pytest.fixture(scope="module", autouse=True)
def _system() -> None:
    try:
        with open_lab(mixed([1.0])):
            pass
    except InputError as reason:
        pytest.skip(str(reason))


def left(pid: int) -> list[str]:
    """Names of what a lab of that process has made."""
    names = [*lab_namespaces(), *find_controller().labs()]
    return [name for name in names if re.search(rf"-{pid}\b", name)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_transfer_between_nodes_takes_what_the_link_says() -> None:
    with open_lab(mixed([1.0, 1.0], bytes_per_s=RATE)) as lab:
        address = lab.scheme.nodes[0].address
        enter = [["ip", "netns", "exec", node.namespace] for node in lab.scheme.nodes]
        with subprocess.Popen(
            [*enter[0], sys.executable, "-c", SERVE, address], stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            server.stdout.readline()
            sent = subprocess.run(
                [*enter[1], sys.executable, "-c", SEND, address],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
    # Other work on this machine can make a transfer slower, never faster.
    assert 0.3 * RATE <= float(sent.stdout) <= 1.15 * RATE
    assert left(os.getpid()) == []


def test_a_spinning_rank_gets_its_quota() -> None:
    with open_lab(mixed([1.0, 0.5])) as lab:
        for place, rank in zip(lab.ranks.ranks, lab.scheme.ranks, strict=True):
            spun = subprocess.run(
                [sys.executable, "-c", SPIN],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=True,
                preexec_fn=place.enter,
            )
            used_s, _ = map(float, spun.stdout.split())
            statistics = (Path(place.members).parent / "cpu.stat").read_text().split()
            throttled = int(statistics[statistics.index("nr_throttled") + 1])
            periods = int(statistics[statistics.index("nr_periods") + 1])
            # A throttled period has used its quota up; beside others' work there are fewer of these.
            assert 0.85 * throttled <= used_s / (rank.quota * 5e-3) <= 1.15 * periods


def start(path: Path, *command: str) -> subprocess.Popen[str]:
    """`weft lab` of a cluster whose command has begun."""
    words = interruptible("-m", "weft", "lab", str(path), "--", "sh", "-c", *command)
    lab = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert lab.stdout is not None
    assert lab.stdout.readline().startswith("begun ")
    return lab


def children_of(lab: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(lab.pid).children(recursive=True)


def runs(process: psutil.Process) -> bool:
    """Whether it is there and was not killed: whoever has inherited it may not have looked at it yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_inside_is_told_the_path_of_the_labs_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    words = [sys.executable, "-m", "weft", "lab", "c.toml", "--", "printenv", VARIABLE]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert json.loads(told.stdout)["named"] == str(tmp_path / "c.toml")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_lab_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    lab = start(tmp_path / "c.toml", "sleep 300 & echo begun $$; wait")
    assert left(lab.pid)
    inside = children_of(lab)
    lab.send_signal(number)
    assert lab.wait(LIMIT_S) == 128 + number
    assert left(lab.pid) == []
    assert inside
    wait_for(lambda: not any(map(runs, inside)))


def test_what_a_killed_lab_leaves_the_next_one_removes(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    lab = start(tmp_path / "c.toml", "sleep 300 & echo begun $$; wait")
    inside = children_of(lab)
    lab.kill()
    lab.wait(LIMIT_S)
    assert left(lab.pid)
    with open_lab(mixed([1.0])):
        assert left(lab.pid) == []
    wait_for(lambda: not any(map(runs, inside)))


def test_commands_on_nodes_know_their_rank_and_the_first_failure_is_the_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    say = 'echo "$RANK/$WORLD_SIZE $NODE_RANK/$NNODES $GLOO_SOCKET_IFNAME"; exit $((RANK * 3))'
    assert run(["lab", str(tmp_path / "c.toml"), "--per-node", "--", "sh", "-c", say]) == 3
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["0/2 0/2 weft0", "1/2 1/2 weft0"]
    assert "lab: a device of relative speed 1 has 90.0% of a core" in shown.err
    assert "lab: g1-0: 45.0% of a core; 20.0 MB/s to g0-0" in shown.err
    assert "latencies are the kernel's own; the file's, up to 100 us, are not made" in shown.err


def test_ranks_meet_on_their_nodes(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "behaviour").write_text("meet")
    search = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    words = ["lab", str(tmp_path / "c.toml"), "--", "env", f"PYTHONPATH={search}", sys.executable]
    assert run([*words, "-c", LAUNCH, str(run_dir)]) == 0
    for rank in range(2):
        assert f"rank {rank} of 2 on 1 threads: 1" in (run_dir / "logs" / f"rank-{rank}.log").read_text()


def test_ranks_listen_on_the_labs_own_addresses_only(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "behaviour").write_text("listen")
    search = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    lab = start(
        tmp_path / "c.toml",
        f"echo begun $$; PYTHONPATH={search} exec {sys.executable} -c '{LAUNCH}' {run_dir}",
    )
    try:
        wait_for(lambda: all((run_dir / f"ready-{rank}").exists() for rank in range(2)))
        found = listeners(psutil.Process(lab.pid))
    finally:
        lab.terminate()
        lab.wait(LIMIT_S)
    assert {address for _, address in found} == {HUB_ADDRESS, "10.213.0.1", "10.213.0.2"}
    assert left(lab.pid) == []


def test_a_command_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(to_toml(mixed()))
    assert run(["lab", str(tmp_path / "c.toml"), "--", "no-such-command"]) == 2
    assert "lab: no-such-command: no such command" in capsys.readouterr().err
    assert left(os.getpid()) == []
