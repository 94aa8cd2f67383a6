"""Jobs of a real Slurm from the emitted script: to the end, cancelled and submitted again, without a node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_slurm import LocalSlurm, local_slurm, names_of_nodes
from run_inputs import cluster_text, run_on_nodes

from weft.cli.main import run
from weft.training.directory.run_directory import RunDirectory

pytestmark = [pytest.mark.tables, pytest.mark.processes, pytest.mark.cold]


_KIND = """
[[node]]
name = "{0}"
device = "{0}"
devices = 2
bandwidth = "1 GB/s"
latency = "50 us"
[device.{0}]
flops = {{ fp32 = "{1} GFLOP/s" }}
memory = "4 GB"
memory_bandwidth = "10 GB/s"
launch = "1 us"
synchronous = true
"""
TWO_KINDS = f"""
name = "two kinds"
{_KIND.format("old", 40)}
{_KIND.format("new", 50)}
[[link]]
between = ["old", "new"]
bandwidth = "1 GB/s"
latency = "50 us"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    with local_slurm(tmp_path_factory.mktemp("slurm")) as found, pytest.MonkeyPatch.context() as patched:
        # Scripts call `weft` and `torchrun`.
        path = f"{Path(sys.executable).parent}:{found.environment['PATH']}"
        patched.setitem(found.environment, "PATH", path)
        yield found


def emitted(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    steps: int,
    tables: str = "",
    cluster: str = cluster_text(2, nodes=2),
) -> Path:
    """The script of a run on two nodes of two processors."""
    path = run_on_nodes(folder, cluster, steps=steps)
    path.write_text(path.read_text() + tables)
    capsys.readouterr()
    assert run(["plan", str(path), "--emit", "slurm"]) == 0
    (folder / "slurm.sh").write_text(capsys.readouterr().out)
    return folder / "slurm.sh"


def reaches(folder: Path, step: int) -> Callable[[], bool]:
    name = f"runs/*/checkpoints/step-{step:08d}"
    return lambda: any(folder.glob(name))


def only_run(folder: Path) -> RunDirectory:
    (path,) = (folder / "runs").iterdir()
    return RunDirectory(path)


def test_a_cancelled_job_saves_and_the_same_script_goes_on(
    slurm: LocalSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = emitted(tmp_path, capsys, steps=200)
    job = slurm.submit(script)
    slurm.wait_for(job, reaches(tmp_path, 40))
    slurm.call("scancel", job)
    assert slurm.ended(job)[0] == "CANCELLED"
    job = slurm.submit(script)
    assert slurm.ended(job) == ("COMPLETED", "0:0")
    directory = only_run(tmp_path)
    told = [one["event"] for one in directory.events()]
    assert [one for one in told if one in ("started", "stopped", "resumed", "finished")] == [
        "started",
        "stopped",
        "resumed",
        "finished",
    ]
    assert [row["step"] for row in directory.metrics()] == list(range(200))
    # The script compares the run with its prediction at the end.
    assert directory.summary()["world_size"] == 4
    assert "median per instruction" in (tmp_path / f"slurm-{job}.out").read_text()


def test_nodes_of_two_kinds_are_one_job_of_two_components(
    slurm: LocalSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = emitted(tmp_path, capsys, steps=8, cluster=TWO_KINDS)
    assert "#SBATCH hetjob" in script.read_text()
    job = slurm.submit(script)
    assert slurm.ended(job) == ("COMPLETED", "0:0")
    directory = only_run(tmp_path)
    assert directory.summary()["world_size"] == 4
    assert len(directory.metrics()) == 8


def test_an_elastic_job_ends_well_without_a_node(
    slurm: LocalSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = "[run]\nmin_nodes = 1\nmax_nodes = 2\nmax_restarts = 3\n"
    job = slurm.submit(emitted(tmp_path, capsys, steps=400, tables=limits))
    slurm.wait_for(job, reaches(tmp_path, 40))
    # The first node of a job holds the meeting.
    slurm.lose(names_of_nodes()[1])
    assert slurm.ended(job) == ("COMPLETING", "0:0")
    directory = only_run(tmp_path)
    assert "plan changed" in [one["event"] for one in directory.events()]
    assert [row["step"] for row in directory.metrics()] == list(range(400))
    assert directory.summary()["world_size"] == 2
