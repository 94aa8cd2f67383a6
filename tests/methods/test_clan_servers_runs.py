"""Whole runs with servers: told, drawn, killed and resumed bit by bit, and gone on without servers."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from methods.test_clan_runs import losses, told
from methods.test_clan_servers import CLUSTER
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved
from web.charts.test_cluster import devices_of

from weft.cli.tables.plan import cluster_table
from weft.training.directory.event_words import event_words
from weft.training.session import reopen
from weft.web.charts.cluster import cluster_svg

pytestmark = pytest.mark.usefixtures("own_home")

RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{folder}/text.txt"
sequence = 32
[train]
global_batch = 6
steps = {steps}
[checkpoint]
every = 2
[goal]
contract = "empirical"
[cluster]
use = "{folder}/hosts.toml"
[plan]
dp = {dp}
pp = 1
micro_batch_size = 1
[sync]
method = "clan"
codec = "top-k"
ratio = 8.0
minimum_bytes = 4096
piece_bytes = 1000000
servers = {servers}
"""


def run_file(folder: Path, *, dp: int, servers: int, steps: int = 4) -> Path:
    (folder / "text.txt").write_text("warp weft loom " * 2000)
    (folder / "hosts.toml").write_text(CLUSTER.format(memory="4 GB"))
    path = folder / f"{dp}-and-{servers}-for-{steps}.toml"
    path.write_text(RUN.format(folder=folder, dp=dp, servers=servers, steps=steps))
    return path


@pytest.mark.processes
def test_a_run_with_servers_goes_on_after_a_kill_as_if_nothing_had_been(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    run = trained(worker_pool, run_file(tmp_path, dp=2, servers=2), directory=tmp_path / "run")
    (event,) = told(run, "events.jsonl", "servers")
    assert event["servers"] == "server 0 on host 2 (rank 2), server 1 on server (rank 3)"
    words = event_words(event)
    assert words is not None
    assert words == (f"gradients are added up by {event['servers']}", False)
    assert event["servers"] in (run / "report.html").read_text()
    job = reopen(run)
    cluster = job.problem.job.cluster
    drawn = devices_of(cluster_svg(cluster, job.plan, title="run"))
    assert [drawn[rank] for rank in range(4)] == ["stage 0", "stage 0", "server 0", "server 1"]
    stages = list(cluster_table(cluster, job.plan).columns[-1].cells)
    assert stages[:2] == ["0, 1 server", "1 server"]

    killed = tmp_path / "killed"
    copytree(run, killed)
    rmtree(killed / "checkpoints" / "step-00000004")
    trained(worker_pool, killed)
    assert told(killed, "events.jsonl", "resumed")[-1]["checkpoint"] == "step-00000002"
    assert losses(killed) == losses(run)
    expected, found = saved(run), saved(killed)
    assert expected.keys() == found.keys()
    assert any(name.startswith("rank/3/method/clan/owned/0/") for name in found)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())

    # Without servers, the sum of all that is unsent goes on: the run does not begin anew.
    trained(worker_pool, run_file(tmp_path, dp=3, servers=0, steps=5), resume=run, steps=5)
    assert not told(run, "events.jsonl", "began anew", "resume differs")
    assert len(losses(run)) == 5
