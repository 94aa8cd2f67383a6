"""Nodes without a common file system: real agents of torchrun, each with a directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from run_inputs import cluster_text, run_on_nodes
from torchrun_runs import ending, free_port, worker
from waiting_runs import wait_for
from warm_starts import Template

from weft.cli.main import run
from weft.run.record.clocks import read_clocks
from weft.training.directory.run_directory import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

OTHER_VERSION = """
import weft
weft.__version__ = "9.9"
"""


def prepared(
    folder: Path,
    *,
    steps: int,
    every: int = 2,
    checkpoints: str = "",
    interface: str = "lo",
    tables: str = "",
) -> Path:
    """The directory of a run on two nodes of two ranks, on the first one; `folder` has one for each node."""
    cluster = cluster_text(2, nodes=2).replace("[[node]]\n", f'[[node]]\ninterface = "{interface}"\n')
    kept = f'{every}\ndirectory = "{checkpoints}"' if checkpoints else every
    path = run_on_nodes(folder, cluster, steps=steps, every=kept)
    path.write_text(path.read_text() + tables)
    (folder / "a").mkdir(exist_ok=True)
    (folder / "b").mkdir(exist_ok=True)
    again = (folder / "a" / "run").exists()
    where = ["--resume" if again else "--directory", str(folder / "a" / "run")]
    assert run(["train", str(path), *where, "--prepare-only"]) == 0
    return folder / "a" / "run"


@contextmanager
def agents(
    folder: Path,
    *options: str,
    variables: Mapping[str, str] | None = None,
    module: str = "weft.training.worker",
) -> Iterator[Sequence[Popen[str]]]:
    """An agent for each node, with the run in `a/run` and `b/run`; `variables` are those of the second."""
    port = str(free_port())
    meeting = ("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *options)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                worker(
                    folder / name / "run",
                    folder / name,
                    *meeting,
                    "--master-port",
                    port,
                    "--node-rank",
                    str(number),
                    module=module,
                    **(variables or {} if number else {}),
                )
            )
            for number, name in enumerate("ab")
        ]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in RunDirectory(run_dir).metrics()]


def files(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


def shards(path: Path) -> set[int]:
    return {int(one.name.split("-")[1]) for one in path.glob("shard-*")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    """A run of two nodes that has trained four steps."""
    folder = tmp_path_factory.mktemp("apart")
    prepared(folder, steps=4)
    with template.warming(), agents(folder) as nodes:
        ended = [ending(one) for one in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    return folder


def test_nodes_train_from_copies_of_the_run_and_keep_the_files_of_their_ranks(trained: Path) -> None:
    one, other = trained / "a" / "run", trained / "b" / "run"
    for name in ("run.toml", "plan.json", "run-id"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    newest = "checkpoints/step-00000004"
    assert (shards(one / newest), shards(other / newest)) == ({1, 2}, {3, 4})
    assert (one / newest / "manifest.json").read_bytes() == (other / newest / "manifest.json").read_bytes()
    assert not any(name.startswith(".weft-node") for name in files(one) | files(other))
    assert not {"metrics.jsonl", "events.jsonl", "result.json"} & files(other)


def test_the_first_node_merges_the_records_of_all_by_one_clock(trained: Path) -> None:
    directory = RunDirectory(trained / "a" / "run")
    (comparisons,) = read_clocks(directory.path).comparisons.values()
    # Both agents run on one machine, which has one clock.
    assert len(comparisons) == 2
    assert all(abs(one.offset_ns) <= one.error_ns for one in comparisons)
    assert run(["compare", str(directory.path), "--json"]) == 0
    measured = directory.measured()
    assert set(measured.rank.tolist()) == {0, 1, 2, 3}
    assert measured.clock_error_ns >= max(one.error_ns for one in comparisons)


def test_apart_or_not_a_run_has_the_same_losses(trained: Path, tmp_path: Path) -> None:
    run_dir = prepared(tmp_path, steps=4)
    (tmp_path / "b" / "run").symlink_to(run_dir)
    with agents(tmp_path) as nodes:
        assert [ending(one)[0] for one in nodes] == [0, 0]
    assert losses(run_dir) == losses(trained / "a" / "run")
    assert shards(run_dir / "checkpoints" / "step-00000004") == {1, 2, 3, 4}
    assert not any(name.startswith(".weft-node") for name in files(run_dir))


def test_checkpoints_that_all_nodes_see_outlive_a_node(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    run_dir = prepared(tmp_path, steps=4, checkpoints=str(shared))
    with agents(tmp_path) as nodes:
        assert [ending(one)[0] for one in nodes] == [0, 0]
    (kept,) = shared.iterdir()
    assert shards(kept / "step-00000004") == {1, 2, 3, 4}
    for name in ("a", "b"):
        assert (tmp_path / name / "run" / "checkpoints").readlink() == kept
    assert not any(name.startswith(".weft-node") for name in files(tmp_path))
    # The rest of the cluster goes on from them.
    shutil.rmtree(tmp_path / "b")
    rest = (tmp_path / "run.toml").read_text().replace("dp = 2", "dp = 1").replace("steps = 4", "steps = 6")
    (tmp_path / "run.toml").write_text(rest)
    assert run(["train", str(tmp_path / "run.toml"), "--resume", str(run_dir), "--json"]) == 0
    assert len(losses(run_dir)) == 6
    assert (kept / "step-00000006" / "manifest.json").exists()


def test_nodes_apart_evaluate_the_checkpoint_of_all(trained: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    one, other = (tmp_path / name / "run" for name in ("a", "b"))
    with agents(tmp_path, module="weft.training.evaluation.worker") as nodes:
        assert [ending(each)[0] for each in nodes] == [0, 0]
    assert not (other / "evaluation.json").exists()
    found = RunDirectory(one).evaluation()
    assert found["step"] == 4
    assert found["loss"] == pytest.approx(RunDirectory(one).result()["final_loss"], rel=1e-6)


def test_nodes_apart_go_on_under_another_plan_with_the_tensors_that_their_ranks_read(
    trained: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    newest = "run/checkpoints/step-00000004"
    shutil.copytree(tmp_path / "a", tmp_path / "whole")
    shutil.copytree(tmp_path / "b" / newest, tmp_path / "whole" / newest, dirs_exist_ok=True)
    text = (
        (trained / "run.toml").read_text().replace("steps = 4", "steps = 6").replace("every = 2", "every = 9")
    )
    text = text.replace("pp = 2\ndp = 2", "pp = 4\ndp = 1").replace('sharding = "zero-1"', "")
    (tmp_path / "run.toml").write_text(text)
    whole, apart = tmp_path / "whole" / "run", tmp_path / "a" / "run"
    resumed = ["train", str(tmp_path / "run.toml"), "--resume"]
    assert run([*resumed, str(apart), "--prepare-only"]) == 0
    with agents(tmp_path) as nodes:
        ended = [ending(one) for one in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert [shards(tmp_path / name / newest) for name in ("a", "b")] == [{1, 2}, {3, 4}]
    assert not list(tmp_path.glob("*/run/checkpoints/.reading"))
    assert run([*resumed, str(whole), "--json"]) == 0
    assert len(losses(whole)) == 6
    assert losses(apart) == losses(whole)


def test_an_elastic_run_is_offered_by_the_node_that_has_it(tmp_path: Path) -> None:
    url, limits = (tmp_path / "store").as_uri(), "[run]\nmin_nodes = 1\n"
    prepared(tmp_path, steps=4, checkpoints=url, tables=limits)
    one, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    one.rename(other)
    # Rank 0's node has just come, twice: before the first step, and before the last one.
    for steps in (4, 6):
        with agents(tmp_path) as nodes:
            assert [ending(each)[0] for each in nodes] == [0, 0]
        assert len(losses(one)) == steps
        for name in ("run-id", "run.toml", "at-hand/prepared", "at-hand/2/plan.json", "at-hand/4/plan.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
        # It has what `weft compare` reads, too.
        assert run(["compare", str(one), "--json"]) == 0
        assert not (other / "metrics.jsonl").exists()
        if steps == 4:
            whole = losses(one)
            shutil.rmtree(one)
            text = (tmp_path / "run.toml").read_text().replace("steps = 4", "steps = 6")
            (tmp_path / "run.toml").write_text(text)
            assert run(["train", str(tmp_path / "run.toml"), "--resume", str(other), "--prepare-only"]) == 0
    assert losses(one)[:4] == whole
    assert [event["event"] for event in RunDirectory(one).events()].count("resumed") == 1
    # Rank 0's run is no longer elastic, whatever the other node still has.
    text = (tmp_path / "run.toml").read_text().replace(limits, "").replace("steps = 6", "steps = 7")
    (tmp_path / "run.toml").write_text(text)
    assert run(["train", str(tmp_path / "run.toml"), "--resume", str(one), "--prepare-only"]) == 0
    with agents(tmp_path) as nodes:
        assert [ending(each)[0] for each in nodes] == [0, 0]
    assert len(losses(one)) == 7
    assert not (other / "at-hand").exists()


@pytest.mark.cold  # its processes are found by their variables
def test_a_killed_rank_is_replaced_by_restarts_and_nodes_read_their_checkpoint_together(
    trained: Path, tmp_path: Path
) -> None:
    run_dir = prepared(tmp_path, steps=100, every=40)
    events = run_dir / "events.jsonl"
    with agents(tmp_path, "--max-restarts", "1") as nodes:
        wait_for((run_dir / "checkpoints" / "step-00000040").exists, nodes[0])
        ranks = [one for node in nodes for one in psutil.Process(node.pid).children()]
        next(one for one in ranks if one.environ().get("RANK") == "3").send_signal(signal.SIGKILL)
        ended = [ending(one) for one in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert any(f"; rank 3 on {socket.gethostname()} is gone" in errors for _, errors in ended), ended
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [one["event"] for one in told if one["event"] in ("started", "resumed", "finished")] == [
        "started",
        "resumed",
        "finished",
    ]
    assert losses(run_dir)[:4] == losses(trained / "a" / "run")
    assert len(losses(run_dir)) == 100


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("files", "no directory has shard-00003-model"),
        ("run", "b/run: holds another run than rank 0's directory"),
        pytest.param("version", "has weft 9.9, not 0.1.0 as ", marks=pytest.mark.cold),
        ("start", "a/run: not a run directory: it has no plan.json"),
        ("unshared", "no such folder; all nodes must see it"),
        ("apart", "and rank 0's node see other folders at "),
        ("interface", "node.interface: 'eth77' has no IPv4 address (nearest valid: "),
    ],
)
def test_what_is_wrong_is_said_before_the_first_step(case: str, said: str, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared") if case in ("unshared", "apart") else ""
    interface = "eth77" if case == "interface" else "lo"
    run_dir = prepared(tmp_path, steps=4, checkpoints=shared, interface=interface)
    other = tmp_path / "b" / "run"
    variables = {}
    if case in ("unshared", "apart"):
        # One path leads to another folder on each node, as agents work in folders of their own.
        link = run_dir / "checkpoints"
        here = tmp_path / "a" / "mounted"
        link.readlink().rename(here)
        link.unlink()
        link.symlink_to("/proc/self/cwd/mounted")
        if case == "apart":
            (tmp_path / "b" / "mounted").mkdir()
    elif case == "files":
        with agents(tmp_path) as nodes:
            assert [ending(one)[0] for one in nodes] == [0, 0]
        for lost in other.glob("checkpoints/*/shard-00003*"):
            lost.unlink()
        prepared(tmp_path, steps=6)
    elif case == "run":
        other.mkdir()
        (other / "plan.json").write_text("{}")
    elif case == "version":
        (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
        variables["PYTHONPATH"] = os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    elif case == "start":
        (run_dir / "plan.json").unlink()
    before = losses(run_dir) if case == "files" else []
    with agents(tmp_path, variables=variables) as nodes:
        ended = [ending(one) for one in nodes]
    for code, errors in ended:
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == 1  # that of torchrun
        assert lines
        assert all(said in line for line in lines), errors
    if case in ("version", "start"):
        assert not other.exists()
    assert (losses(run_dir) if case == "files" else []) == before
