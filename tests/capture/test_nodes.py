"""Links between nodes: every pair once, real messages, medians, and the slow ones by name."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool

from weft.capture.nodes import (
    MeasuredLink,
    MeasuredNode,
    MeasuredNodes,
    measure_nodes,
    tournament,
    with_medians,
)
from weft.cli.main import run
from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_expression import cluster_from_expression
from weft.describe.cluster_file import cluster_of, load_cluster
from weft.describe.cluster_tables import to_toml
from weft.describe.reading import parse_toml
from weft.describe.this_machine import this_machine
from weft.errors import InputError
from weft.run.launch.worker_start import WorkerContext

CALL = "from weft.cli.main import main; main()"
CLUSTER = cluster_from_expression("16xa100-80gb+8xh100-80gb")


@given(st.integers(1, 9))
def test_every_pair_of_nodes_meets_once_and_no_node_twice_at_a_time(count: int) -> None:
    nodes = [MeasuredNode(f"n{index}", (index,), "a") for index in range(count)]
    rounds = list(tournament(nodes))
    for pairs in rounds:
        met = [node.host for pair in pairs for node in pair]
        assert len(met) == len(set(met))
    pairs = [frozenset(node.host for node in pair) for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {frozenset((one.host, other.host)) for one, other in combinations(nodes, 2)}


def link(one: int, other: int, rate: float) -> MeasuredLink:
    groups = ("a100-80gb", "a100-80gb", "h100-80gb")
    ends = [MeasuredNode(f"n{index}", (index,), groups[index]) for index in (one, other)]
    return MeasuredLink((ends[0], ends[0] if one == other else ends[1]), Link(rate, 1e-5))


def test_medians_replace_the_links_that_were_measured_and_outliers_have_names() -> None:
    links = [link(0, 0, 9e9), link(1, 1, 7e9), link(0, 1, 3e9), link(0, 2, 2e9), link(1, 2, 1e9)]
    cluster = with_medians(CLUSTER, links)
    assert cluster.groups[0].link == Link(8e9, 1e-5)
    assert cluster.groups[1].link == CLUSTER.groups[1].link
    assert cluster.links["a100-80gb", "a100-80gb"] == Link(3e9, 1e-5)
    assert cluster.links["a100-80gb", "h100-80gb"] == Link(1.5e9, 1e-5)
    # What was measured is no longer assumed.
    assert cluster.assumed_inside == {"h100-80gb"}
    assert cluster.assumed_between == frozenset()
    slow = MeasuredNodes(cluster, tuple(links)).slow
    assert [one.words for one in slow] == ["n1 - n2"]


def measured(
    rank: int, ranks: int, cluster: Cluster, local: int
) -> list[tuple[str, tuple[str, str], bool]] | str:
    """Measure nodes of `local` ranks each; return the kinds of the links that were found."""
    context = WorkerContext(rank, ranks, rank % local, "cpu", 1)
    try:
        found = measure_nodes(cluster, context)
    except InputError as error:
        return str(error)
    assert all(one.link.bytes_per_s > 0 and one.link.latency_s > 0 for one in found.links)
    return [(one.words, one.pair, one.is_inside) for one in found.links]


@pytest.mark.processes
def test_real_ranks_measure_inside_and_between_their_nodes(
    worker_pool: WorkerPool,
) -> None:
    cluster = cores()
    first, *others = worker_pool.run(measured, cluster, 2, ranks=4)
    assert [inside for *_, inside in first] == [True, True, False]
    assert {pair for _, pair, _ in first} == {("cpu", "cpu")}
    assert others == [first] * 3
    # Nodes of one device have no links inside; three nodes meet in three pairs.
    assert [inside for *_, inside in worker_pool.run(measured, cluster, 1, ranks=3)[0]] == [False] * 3


@pytest.mark.processes
def test_a_node_that_the_file_does_not_have_is_refused_on_every_rank(worker_pool: WorkerPool) -> None:
    for line in worker_pool.run(measured, CLUSTER, 1, ranks=2):
        assert "has devices of kind cpu; the file has a100-80gb, h100-80gb" in line


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_the_command_keeps_the_links_in_a_file_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "mine.toml").write_text(to_toml(cores()))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    program = [sys.executable, "-c", CALL, "measure", "--nodes", str(tmp_path / "mine.toml"), "--json"]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (one,) = answer["links"]
    assert one["link"].startswith("inside ")
    assert load_cluster(answer["file"]).groups[0].link == Link(one["bytes_per_s"], one["latency_s"])


def cores() -> Cluster:
    """This machine's cores, twice: two nodes."""
    record = parse_toml(to_toml(this_machine()), "cores")
    record["node"][0]["count"] = 2
    record["link"] = [{"between": ["cpu", "cpu"], "bandwidth": "1 GB/s", "latency": "9 us"}]
    return cluster_of(record, "cores")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes", "{file}"], "--nodes: every node runs this command"),
        (["--nodes", "no-file.toml"], "no-file.toml"),
        (["gpt2", "--nodes", "{file}"], "MODEL: does not go with --nodes"),
        (["--micro-batches", "1", "--nodes", "{file}"], "--micro-batches: does not go with --nodes"),
    ],
)
def test_bad_input_is_refused_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "c.toml"
    file.write_text(to_toml(CLUSTER))
    assert run(["measure", *(word.format(file=file) for word in words)]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("nodes", "slurm", "torchrun"),
    [
        ("2xt4", "--nodes 1 --ntasks-per-node 2 ", "--nnodes 1 --node-rank I --nproc-per-node 2 "),
        ("32xa100-80gb", "--nodes 4 --ntasks-per-node 8 ", "--nnodes 4 --node-rank I --nproc-per-node 8 "),
        ("2xt4+4xa100-80gb", "--nodes 2 --ntasks 6 ", "--nnodes 2 --node-rank I --nproc-per-node DEVICES "),
    ],
)
def test_a_launcher_is_suggested_with_the_devices_of_the_clusters_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nodes: str,
    slurm: str,
    torchrun: str,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "c.toml"
    file.write_text(to_toml(cluster_from_expression(nodes)))
    assert run(["measure", "--nodes", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"srun {slurm}weft measure --nodes {file}" in err
    assert f"torchrun {torchrun}" in err
