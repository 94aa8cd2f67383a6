"""Elastic runs: real agents of torchrun that lose nodes and take in others, in a common run directory."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from run_inputs import cluster_text, run_on_nodes
from torchrun_runs import ending, free_port, worker
from waiting_runs import wait_for

from weft.cli.main import run
from weft.describe.plan_file import load_plan
from weft.training.directory.plans_at_hand import files_at_hand, is_elastic, largest_at_hand, take_at_hand
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import reopen

ELASTIC = "[run]\nmin_nodes = 1\nmax_nodes = 3\nmax_restarts = 3\n"


def written(folder: Path, *, steps: int, nodes: int = 2, **tables: str) -> Path:
    cluster = cluster_text(2, nodes=nodes, precision="fp64")
    return run_on_nodes(folder, cluster, steps=steps, train='precision = "fp64"', **tables)


def prepared(folder: Path, *, steps: int, tables: str = ELASTIC, nodes: int = 2, **others: str) -> Path:
    """The directory of a run on nodes of two ranks."""
    path = written(folder, steps=steps, nodes=nodes, **others)
    path.write_text(path.read_text() + tables)
    command = ["train", str(path), "--directory", str(folder / "run"), "--prepare-only"]
    assert run(command) == 0
    return folder / "run"


def plan_ranks(run_dir: Path) -> int:
    return load_plan(run_dir / "plan.json").ranks


def test_a_start_takes_the_largest_plan_for_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = prepared(tmp_path, steps=4)
    printed, told = capsys.readouterr()
    assert re.fullmatch(
        r"with 4 ranks: predicted step \S+ \S+, pp 2 x dp 2, .*\nwith 2 ranks: predicted step \S+ \S+, .*\n",
        told,
    )
    assert "torchrun --nnodes 1:3 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d" in printed
    # torch's agents would else keep a node out that comes later.
    assert printed.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    directory, whole = RunDirectory(run_dir), (run_dir / "plan.json").read_bytes()
    assert is_elastic(directory)
    smaller = load_plan(run_dir / "at-hand" / "2" / "plan.json")
    assert (smaller.ranks, smaller.global_batch, smaller.precision) == (2, 8, "fp64")
    # Three ranks, six and two: a node may lack a device, a node may be a spare, a node may be lost.
    for ranks, taken in ((3, 2), (6, 4), (2, 2), (4, 4)):
        assert take_at_hand(directory, ranks) == taken == plan_ranks(run_dir)
        assert directory.own_plan.read_bytes() == whole
        assert (run_dir / "plan-of-all.json").exists() == (taken == 2)
        # Others look at the run under any plan, and it keeps its own.
        for looked in (2, 4):
            assert reopen(run_dir, ranks=largest_at_hand(directory, looked + 1)).plan.ranks == looked
        assert plan_ranks(run_dir) == taken
        for name in ("verified.json", "program.txt", "predicted.parquet"):
            assert (run_dir / name).read_bytes() == (run_dir / "at-hand" / str(taken) / name).read_bytes()
    with pytest.raises(ValueError, match=r"started with 1 rank; the smallest plan at hand needs 2"):
        take_at_hand(directory, 1)
    # A refused resume keeps them.
    (tmp_path / "run.toml").write_text(
        (tmp_path / "run.toml").read_text().replace("min_nodes = 1", "min_nodes = 3")
    )
    at_hand = {name: (run_dir / name).read_bytes() for name in files_at_hand(directory)}
    assert run(["train", str(tmp_path / "run.toml"), "--resume", str(run_dir), "--prepare-only"]) == 2
    assert {name: (run_dir / name).read_bytes() for name in files_at_hand(directory)} == at_hand
    (tmp_path / "run.toml").write_text(
        (tmp_path / "run.toml").read_text().replace("min_nodes = 3", "min_nodes = 1")
    )
    # A resume with all nodes keeps none of a former run file's plans.
    take_at_hand(directory, 2)
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace(ELASTIC, ""))
    assert run(["train", str(tmp_path / "run.toml"), "--resume", str(run_dir), "--prepare-only"]) == 0
    assert not is_elastic(directory)
    assert plan_ranks(run_dir) == 4


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ("[run]\nmin_nodes = 3\n", "run.min_nodes: 3; the plan has 2 nodes (nearest valid: 2)"),
        ("[run]\nmax_nodes = 1\n", "run.max_nodes: 1; the plan has 2 nodes (nearest valid: 2)"),
        (
            '[run]\nmin_nodes = 1\n[plan.then]\nat_step = 2\nschedule = "gpipe"\n',
            "run.min_nodes: plan.then changes the plan, too",
        ),
        ("tp = 4\n[run]\nmin_nodes = 1\n", "run.min_nodes: no plan for 1 node: "),
    ],
)
def test_limits_that_cannot_hold_are_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: str, said: str
) -> None:
    path = written(tmp_path, steps=4)
    text = path.read_text()
    if tables.startswith("tp"):
        text = text.replace("pp = 2\ndp = 2\n", "pp = 1\n")
        text = text.replace('sharding = "zero-1"\n', "")
    path.write_text(text + tables)
    command = ["train", str(path), "--directory", str(tmp_path / "run"), "--prepare-only"]
    assert run(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "run").exists()


class Agents:
    """Agents of torchrun that meet at one address, held by the first; each is a node of two ranks.

    Without a directory of its own, a node has the folder's.
    """

    def __init__(self, stack: ExitStack, folder: Path, least: int, restarts: int) -> None:
        self._address = "127.0.0.1", free_port()
        self._stack, self._folder = stack, folder
        self._limits = ["--nnodes", f"{least}:3", "--max-restarts", str(restarts)]

    def start(self, run_dir: Path | None = None, module: str = "weft.training.worker") -> Popen[str]:
        meeting = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [*self._limits, "--nproc-per-node", "2", "--rdzv-id", "weft", "--rdzv-backend", "c10d"]
        options += [
            "--rdzv-endpoint",
            "{}:{}".format(*self._address),
            "--rdzv-conf",
            meeting,
            "--local-addr",
            "127.0.0.1",
        ]
        launcher = ("torch.distributed.run", *options)
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        run_dir = run_dir or self._folder / "run"
        agent = worker(run_dir, self._folder, *launcher, module=module, **variables)
        started = self._stack.enter_context(agent)
        wait_for(self._meets, started)
        return started

    def _meets(self) -> bool:
        with socket.socket() as line:
            return line.connect_ex(self._address) == 0


@contextmanager
def agents(folder: Path, *, least: int = 1, restarts: int) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(stack, folder, least, restarts)


def lose(node: Popen[str]) -> None:
    """Kill a node, with all its processes at once."""
    agent = psutil.Process(node.pid)
    for one in [agent, *agent.children(recursive=True)]:
        one.send_signal(signal.SIGKILL)


def reaches(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: len(RunDirectory(run_dir).metrics()) >= step


@pytest.mark.tables
@pytest.mark.processes
@pytest.mark.cold  # an agent and its ranks are killed together
@pytest.mark.timeout(900)  # three minutes of two quiet cores
def test_a_run_goes_on_without_a_node_and_with_a_new_one_from_its_checkpoints(tmp_path: Path) -> None:
    steps = 500
    run_dir = prepared(tmp_path, steps=steps)
    whole = json.loads((run_dir / "plan.json").read_bytes())["plan_id"]
    with agents(tmp_path, restarts=3) as nodes:
        first, second = nodes.start(), nodes.start()
        wait_for(reaches(run_dir, 60), first)
        assert plan_ranks(run_dir) == 4
        lose(second)
        wait_for(lambda: plan_ranks(run_dir) == 2, first)
        alone = RunDirectory(run_dir).metrics()[-1]["step"]
        wait_for(reaches(run_dir, alone + 60), first)
        third, spare = nodes.start(), nodes.start()
        ended = [ending(one, within_s=600) for one in (first, third, spare)]
    assert [code for code, _ in ended] == [0, 0, 0], ended
    directory = RunDirectory(run_dir)
    # The plan of all is the run's again, also if the two new nodes have come one after the other.
    assert directory.plan().plan_id == whole
    assert not (run_dir / "plan-of-all.json").exists()
    changes = [one["now"] for one in directory.events() if one["event"] == "plan changed"]
    assert [one == whole for one in changes] == [False, True]
    rows = directory.metrics()
    assert [row["step"] for row in rows] == list(range(steps))
    # One node evaluates under its plan, and the run keeps the plan of all.
    with agents(tmp_path, restarts=0) as nodes:
        assert ending(nodes.start(module="weft.training.evaluation.worker"))[0] == 0
    assert directory.plan().plan_id == whole
    assert directory.evaluation()["step"] == steps
    # The same samples in the same order as in a run that loses nobody.
    calm = tmp_path / "calm"
    calm.mkdir()
    other = prepared(calm, steps=100, tables="")
    assert run(["train", str(other), "--json"]) == 0
    assert [row["loss"] for row in rows[:100]] == pytest.approx(
        [row["loss"] for row in RunDirectory(other).metrics()], rel=1e-6
    )


@pytest.mark.tables
@pytest.mark.processes
@pytest.mark.cold  # an agent and its ranks are killed together
@pytest.mark.timeout(900)
def test_nodes_with_directories_of_their_own_go_on_from_a_url_when_the_first_one_is_lost(
    tmp_path: Path,
) -> None:
    steps, url = 300, (tmp_path / "store").as_uri()
    for name in "abc":
        (tmp_path / name).mkdir()
    a, b, c = (tmp_path / name / "run" for name in "abc")
    prepared(tmp_path / "a", steps=steps, every=f'20\ndirectory = "{url}"')
    with agents(tmp_path, least=2, restarts=0) as nodes:
        first, second = nodes.start(a), nodes.start(b)
        wait_for(lambda: any(reaches(one, 50)() for one in (a, b)), first)
        for node in (first, second):
            lose(node)
    # The run, its plans and its prepared files are lost with the directory in which they were made.
    shutil.rmtree(a)
    assert is_elastic(RunDirectory(b))
    with agents(tmp_path, restarts=3) as nodes:
        second = nodes.start(b)
        wait_for(lambda: plan_ranks(b) == 2 and reaches(b, 90)(), second)
        third = nodes.start(c)
        ended = [ending(one, within_s=600) for one in (second, third)]
    assert [code for code, _ in ended] == [0, 0], ended
    # torchrun may have given rank 0 to the node that came last.
    (last,) = (RunDirectory(one) for one in (b, c) if (one / "result.json").exists())
    rows = last.metrics()
    assert [row["step"] for row in rows] == list(range(steps))
    assert [one["event"] for one in last.events() if one["event"] == "plan changed"] == ["plan changed"] * 2
    assert run(["compare", str(last.path), "--json"]) == 0
    calm = tmp_path / "calm"
    calm.mkdir()
    other = prepared(calm, steps=100, tables="")
    assert run(["train", str(other), "--json"]) == 0
    assert [row["loss"] for row in rows[:100]] == pytest.approx(
        [row["loss"] for row in RunDirectory(other).metrics()], rel=1e-6
    )


@pytest.mark.processes
def test_a_node_with_a_directory_of_its_own_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path, steps=4)
    (tmp_path / "other").mkdir()
    with agents(tmp_path, least=2, restarts=0) as nodes:
        started = [nodes.start(), nodes.start(tmp_path / "other" / "run")]
        ended = [ending(one) for one in started]
    said = re.compile(r"error: \S+: .*run: \S+ has another directory .*or a URL as checkpoint.directory")
    for code, errors in ended:
        assert code == 1
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert lines
        assert all(said.match(line) for line in lines), errors
    shutil.rmtree(tmp_path / "other")
