"""Launching: what a user sees of a failure, and that no kill leaves a process behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from interruptible import interruptible
from listeners import is_loopback, listeners
from small_disk import small_disk

from weft.errors import InputError, RunError
from weft.run.launch.agent import _environment
from weft.run.launch.flight_recorder import record_path
from weft.run.launch.workers import launch_workers

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

TESTS = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path

from weft.run.launch.workers import launch_workers

launch_workers(Path(sys.argv[1]), 2, "launched")
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    return tmp_path / "run"


def behave(run_dir: Path, behaviour: str) -> None:
    run_dir.mkdir()
    (run_dir / "behaviour").write_text(behaviour)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def start_launcher(run_dir: Path, name: str) -> subprocess.Popen[bytes]:
    """A launcher process whose two workers have reached `name`."""
    launcher = subprocess.Popen(interruptible("-c", LAUNCH, str(run_dir)), stderr=subprocess.PIPE)
    files = [run_dir / f"{name}-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and (name == "ready" or file.read_text()) for file in files))
    return launcher


def test_workers_meet_and_their_words_are_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(run_dir, "meet")
    # Warm workers may have met before the first poll otherwise.
    monkeypatch.setattr("weft.run.launch.workers.POLL_S", 0.01)
    polls: list[int] = []
    launch_workers(run_dir, 2, "launched", lambda: polls.append(1))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        text = (run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2 on {threads} threads: 1\n" in text
    assert polls


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are copies of the agent on Linux only")
def test_the_agent_loads_modules_once_for_all_ranks(run_dir: Path) -> None:
    behave(run_dir, "meet")
    launch_workers(run_dir, 2, "launched")
    (agent,) = (run_dir / "loaded").read_text().split()
    ranks = {(run_dir / f"pid-{rank}").read_text() for rank in range(2)}
    assert len(ranks) == 2
    assert agent not in ranks


def test_a_refusal_lists_every_violation(run_dir: Path) -> None:
    behave(run_dir, "refuse")
    with pytest.raises(InputError) as caught:
        launch_workers(run_dir, 2, "launched")
    assert str(caught.value) == "run.toml: first\nrun.toml: second"


def test_a_failure_is_one_line_with_the_log(run_dir: Path) -> None:
    behave(run_dir, "fail")
    with pytest.raises(RunError) as caught:
        launch_workers(run_dir, 2, "launched")
    log = run_dir / "logs" / "rank-1.log"
    assert str(caught.value) == f"the loss is not a number (log: {log})"
    assert "RunError" in log.read_text()


@pytest.mark.parametrize("behaviour", ["die at start", "lose a peer"])
def test_a_killed_rank_is_the_cause_and_not_its_peer(run_dir: Path, behaviour: str) -> None:
    behave(run_dir, behaviour)
    with pytest.raises(RunError) as caught:
        launch_workers(run_dir, 2, "launched")
    text = str(caught.value)
    assert text.startswith("rank 1 was killed by signal 9 (SIGKILL) (log: ")
    assert "\n" not in text


def test_a_rank_that_is_stuck_leaves_its_flight_recorder_when_another_one_has_failed(run_dir: Path) -> None:
    behave(run_dir, "be stuck")
    with pytest.raises(RunError, match="a kernel is broken"):
        launch_workers(run_dir, 2, "launched")
    record = json.loads(record_path(run_dir, 0).read_bytes())
    assert [one["profiling_name"] for one in record["entries"]] == ["gloo:all_reduce"]
    assert not record_path(run_dir, 1).exists()


@pytest.mark.parametrize("victim", ["launcher", "agent", "worker"])
def test_no_kill_leaves_an_orphan(run_dir: Path, victim: str) -> None:
    behave(run_dir, "sleep")
    launcher = start_launcher(run_dir, "pid")
    workers = [psutil.Process(int((run_dir / f"pid-{rank}").read_text())) for rank in range(2)]
    agent = workers[0].parent()
    assert agent is not None
    family = [psutil.Process(launcher.pid), agent, *workers]
    {"launcher": family[0], "agent": agent, "worker": workers[1]}[victim].kill()
    launcher.wait(timeout=60)
    gone, alive = psutil.wait_procs(family[1:], timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert len(gone) + len(alive) == 3
    _, error = launcher.communicate()
    if victim != "launcher":
        name = "the agent that runs the workers" if victim == "agent" else "rank 1"
        assert f"RunError: {name} was killed by signal 9 (SIGKILL) (log: " in error.decode()


def test_a_rank_that_is_stopped_is_killed_soon_when_another_one_has_failed(run_dir: Path) -> None:
    behave(run_dir, "stop and die")
    launcher = start_launcher(run_dir, "pid")
    stopped = psutil.Process(int((run_dir / "pid-0").read_text()))
    assert launcher.wait(timeout=60) == 1
    _, error = launcher.communicate()
    assert "RunError: rank 1 was killed by signal 9 (SIGKILL) (log: " in error.decode()
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


@pytest.mark.cold
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_stop_reaches_the_workers_which_save(run_dir: Path, number: int, exit_code: int) -> None:
    behave(run_dir, "save")
    launcher = start_launcher(run_dir, "ready")
    launcher.send_signal(number)
    assert launcher.wait(timeout=90) == exit_code
    assert [(run_dir / f"saved-{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2


def test_a_local_run_listens_on_loopback_only(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Left in a shell by who starts runs of many machines from there.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", other_interface())
    behave(run_dir, "listen")
    launcher = start_launcher(run_dir, "ready")
    found = listeners(psutil.Process(launcher.pid))
    workers = [int((run_dir / f"pid-{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.communicate()
    assert [address for _, address in found if not is_loopback(address)] == []
    # The store of the job, gloo of both ranks, and the connections that rank 0 waits for.
    holders = [pid for pid, _ in found]
    assert set(workers) < set(holders)
    assert holders.count(workers[0]) > holders.count(workers[1])


def test_nccl_stays_on_loopback_and_leaves_its_record_in_the_run(tmp_path: Path) -> None:
    environment = _environment(tmp_path, 2, "127.0.0.1", 1)
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "logs" / "nccl-timeout-rank-")
    if sys.platform == "linux":
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"


NODE = """
ip link set lo up
ip link add node0 type veth peer name other0
ip address add 10.9.0.1/24 dev node0
ip link set node0 up
ip link set other0 up
exec {python} -m torch.distributed.run --nproc-per-node 2 --master-addr 10.9.0.1 --master-port 29500 \
    -m launched {run_dir}
"""


def test_ranks_of_many_machines_listen_on_the_interface_named_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "a0", "type", "veth"], check=False
    ).returncode:
        pytest.skip("needs the right to make a network")
    behave(run_dir, "listen")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "node0")
    script = NODE.format(python=sys.executable, run_dir=run_dir)
    with subprocess.Popen(["unshare", "--net", "sh", "-ec", script], stderr=subprocess.DEVNULL) as torchrun:
        try:
            wait_for(lambda: all((run_dir / f"ready-{rank}").exists() for rank in range(2)))
            workers = [psutil.Process(int((run_dir / f"pid-{rank}").read_text())) for rank in range(2)]
            found = [address for worker in workers for _, address in listeners(worker)]
        finally:
            torchrun.terminate()
    # gloo of both ranks, and the connections that rank 0 waits for.
    assert set(found) == {"10.9.0.1"}
    assert len(found) >= 3


def other_interface() -> str:
    """One that is no loopback, where there is any."""
    addresses = {
        name: [one.address for one in found if one.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    return next((name for name, ips in addresses.items() if ips and not is_loopback(ips[0])), "lo")


def test_a_stop_that_one_worker_does_not_answer_ends_all(run_dir: Path) -> None:
    behave(run_dir, "hang")
    launcher = start_launcher(run_dir, "ready")
    workers = [psutil.Process(int((run_dir / f"pid-{rank}").read_text())) for rank in range(2)]
    wait_for(lambda: workers[1].status() == psutil.STATUS_STOPPED)
    launcher.send_signal(signal.SIGTERM)
    try:
        _, error = launcher.communicate(timeout=200)
    finally:
        launcher.kill()
    assert launcher.returncode == 143
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert len(gone) + len(alive) == 2
    assert error.decode() == ""


def test_a_full_disk_is_told_with_the_rank_and_the_file(run_dir: Path) -> None:
    with small_disk(run_dir.parent, 1 << 20):
        behave(run_dir, "fill")
        with pytest.raises(RunError) as caught:
            launch_workers(run_dir, 2, "launched")
    line = f"rank 1: {run_dir}/filler: No space left on device"
    assert str(caught.value) == f"{line} (log: {run_dir}/logs/rank-1.log)"


@pytest.mark.cold
def test_a_worker_under_plain_torchrun(run_dir: Path) -> None:
    behave(run_dir, "meet")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "launched", str(run_dir)], capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()
    assert b"rank 1 of 2 on 1 threads: 1" in done.stdout


def test_a_port_in_use_is_one_line(run_dir: Path) -> None:
    script = """
import os, socket
from weft.errors import RunError
from weft.run.launch.worker_start import start_worker
with socket.create_server(("127.0.0.1", 0)) as taken:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
    try:
        start_worker(timeout_s=5)
    except RunError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=180)
    assert b"is in use; choose another one" in done.stdout
    assert done.stdout.count(b"\n") == 1


def test_a_missing_rank_is_one_line(run_dir: Path) -> None:
    script = """
import os
from weft.errors import RunError
from weft.run.launch.worker_start import start_worker
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
try:
    start_worker(timeout_s=1)
except RunError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=180)
    assert b"not all of 2 ranks met at 127.0.0.1:0 within 1 s" in done.stdout
    assert done.stdout.count(b"\n") == 1


def test_an_incomplete_environment_is_refused(run_dir: Path) -> None:
    script = """
import json
from weft.errors import InputError
from weft.run.launch.worker_start import start_worker
try:
    start_worker()
except InputError as error:
    print(json.dumps([str(violation) for violation in error.violations]))
"""
    environment = {"RANK": "0", "WORLD_SIZE": "two", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=180, env=environment)
    lines = json.loads(done.stdout)
    assert [line.split()[1] for line in lines] == ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
