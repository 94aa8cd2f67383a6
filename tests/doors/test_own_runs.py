"""Scripts and manifests that start weft's own runtime: whole, valid, and with every rank once."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from doors.jobs import planned, run_of
from kubernetes_validate import ValidationError, latest_version, validate

from weft.describe.plan_file import load_plan
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import changed, load_run
from weft.doors.emit import emit
from weft.doors.emit.base import Decided
from weft.doors.emit.own_run import files, nodes_of, run_name, start_commands
from weft.errors import InputError
from weft.planning.planned import planned_for
from weft.planning.planned_job import PlannedJob
from weft.training.session import reopen

# Stand-ins that write down how they are called.
STUBS = {
    # Components stand between colons; each has as many nodes as its turn in RANKS says.
    "srun": """set -- "$@" :; rank=0; words=(); for word in "$@"; do
        if [ "$word" != : ]; then words+=("$word"); continue; fi
        for node in $(seq "${RANKS%% *}"); do SLURM_PROCID=$rank "${words[@]: -3}"; rank=$((rank + 1)); done
        RANKS="${RANKS#* }"; words=()
    done""",
    "scontrol": "echo first-node; echo second-node",
    "weft": 'echo "weft $*" >> "$CALLS"',
    "torchrun": 'echo "torchrun $*" >> "$CALLS"',
}


def two_nodes() -> PlannedJob:
    return planned(run_of(), dp=16, sharding="zero-3")


def mixed() -> PlannedJob:
    return planned(run_of(on="16xa100-80gb+8xh100-80gb", global_batch=48), dp=24)


def calls(script: str, folder: Path, **environment: str) -> list[str]:
    """What a script would have started, in a folder of its own."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol", "weft", "torchrun"):
        (programs / name).write_text(f"#!/usr/bin/env bash\n{STUBS[name]}\n")
        (programs / name).chmod(0o755)
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "12007",
    }
    subprocess.run(["bash", "-c", script], env=given | environment, check=True, cwd=folder, timeout=60)
    return (folder / "calls").read_text().splitlines()


def test_the_command_of_each_kind_of_node_is_told_for_a_shell(tmp_path: Path) -> None:
    one, two = (
        start_commands(job, "runs/a") for job in (planned(run_of(on="8xa100-80gb"), dp=8), two_nodes())
    )
    assert one == ["torchrun --nproc-per-node 8 -m weft.training.worker runs/a"]
    called = calls(two[0], tmp_path, NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    sizes = "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500"
    assert called == [f"torchrun {sizes} -m weft.training.worker runs/a"]
    both = [one.partition("  # ")[2] for one in start_commands(mixed(), "runs/a")]
    assert both == ["node 0 to 1", "node 2"]


@pytest.mark.parametrize("stack", ["slurm", "skypilot", "k8s"])
def test_restarts_of_the_run_file_are_those_of_torchrun(stack: str) -> None:
    job = two_nodes()
    table = job.run.run.model_copy(update={"max_restarts": 3})
    again = replace(job, run=job.run.model_copy(update={"run": table}))
    assert "--max-restarts" not in emit(job, stack).text
    assert " --max-restarts 3 " in emit(again, stack).text
    assert all(" --max-restarts 3 " in one for one in start_commands(again, "runs/a"))


def elastic(job: PlannedJob, least: int, most: int) -> PlannedJob:
    limits = {"min_nodes": least, "max_nodes": most, "max_restarts": 2}
    return replace(job, run=job.run.model_copy(update={"run": job.run.run.model_copy(update=limits)}))


def test_an_elastic_run_takes_the_nodes_that_are_there(tmp_path: Path) -> None:
    job = elastic(two_nodes(), 1, 3)
    folder = tmp_path / "runs" / run_name(Decided(job))
    text = emit(job, "slurm").text
    # It begins without the spare, and a lost node does not end it.
    assert "#SBATCH --nodes=2-3\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert "\nsrun --no-kill --kill-on-bad-exit=0 bash -c " in text
    meeting = f"--rdzv-backend c10d --rdzv-id {run_name(Decided(job))} --rdzv-endpoint first-node:20007"
    command = f"torchrun --nnodes 1:3 --nproc-per-node 8 --max-restarts 2 {meeting}"
    started = calls(text, tmp_path, RANKS="3", SLURM_JOB_NODELIST="nodes")
    assert started[1:4] == [f"{command} -m weft.training.worker {folder}"] * 3
    assert yaml.safe_load(emit(job, "skypilot").text)["num_nodes"] == 3
    [pods] = manifests(job)["Job"]
    assert (pods["spec"]["completions"], pods["spec"]["backoffLimit"]) == (3, 6)
    # A pod that takes another one's place must not prepare the run, which goes on.
    [script] = pods["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "/at-hand ] || weft train " in script
    [other] = manifests(two_nodes())["Job"]
    assert other["spec"]["backoffLimit"] == 0


def test_a_run_on_unlike_nodes_is_not_elastic() -> None:
    job = elastic(mixed(), 1, 3)
    for stack in ("slurm", "k8s"):
        with pytest.raises(InputError, match=r"run\.min_nodes: nodes are of several kinds"):
            emit(job, stack)


def test_a_slurm_script_prepares_once_and_starts_every_node(tmp_path: Path) -> None:
    job = two_nodes()
    text = emit(job, "slurm").text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text
    # A task has one processor unless it is given all of the node's.
    assert "#SBATCH --exclusive\n" in text
    folder = tmp_path / "runs" / run_name(Decided(job))
    # Each job has a port of its own.
    worker = "--master-addr first-node --master-port 20007 -m weft.training.worker"
    assert calls(text, tmp_path, RANKS="2", SLURM_JOB_NODELIST="nodes") == [
        f"weft train {folder} --prepare-only",
        f"torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 {worker} {folder}",
        f"torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 {worker} {folder}",
        f"weft compare {folder}",
    ]
    reopened = planned_for(subject_of(load_run(folder / "run.toml")), load_plan(folder / "plan.json"))
    assert reopened.plan.plan_id == job.plan.plan_id


def test_a_slurm_job_of_several_kinds_of_nodes_is_heterogeneous(tmp_path: Path) -> None:
    text = emit(mixed(), "slurm").text
    assert text.count("#SBATCH hetjob\n") == 1
    assert "\nsrun --het-group=0 bash -c " in text
    assert " : --het-group=1 bash -c " in text
    started = calls(text, tmp_path, RANKS="2 1", SLURM_JOB_NODELIST_HET_GROUP_0="nodes")
    for rank in range(3):
        assert [line for line in started if f"--nnodes 3 --nproc-per-node 8 --node-rank {rank} " in line]


@pytest.mark.parametrize(("stack", "words"), [("slurm", "--constraint"), ("k8s", "nodeSelector")])
def test_the_kind_of_nodes_is_the_sites_word_where_a_cluster_has_several(stack: str, words: str) -> None:
    [loss] = emit(mixed(), stack).losses
    assert str(loss).startswith("lost: which nodes are a100-80gb and which h100-80gb, for which each site")
    assert words in str(loss)
    [loss] = emit(planned(run_of(on="16xa100-80gb+8xh100-80gb"), dp=16), stack).losses
    assert str(loss).startswith("lost: which nodes are a100-80gb, for")
    assert not emit(two_nodes(), stack).losses


def test_cpus_are_asked_for_as_cpus() -> None:
    job = planned(run_of("gpt-1m", on="this-machine", global_batch=8, precision="fp32"))
    text = emit(job, "slurm").text
    assert "#SBATCH --cpus-per-task=1\n" in text
    # Since Slurm 22.05 a step does not inherit them.
    assert "\nsrun --cpus-per-task=1 bash -c " in text
    assert "torchrun --standalone --nproc-per-node 1 " in text
    line = "lost: a plan for this machine, which another machine refuses; nearest: plan with --on"
    assert line in text
    assert "cpus: 1+" in emit(job, "skypilot").text
    assert "cpu: 1\n" in emit(job, "k8s").text


def test_a_skypilot_task_starts_every_node(tmp_path: Path) -> None:
    emitted = emit(two_nodes(), "skypilot")
    record = yaml.safe_load(emitted.text)
    assert record["num_nodes"] == 2
    assert record["resources"] == {"accelerators": "A100-80GB:8"}
    # SkyPilot refuses a variable without a value: nobody said from where weft is installed.
    assert record["envs"]["WEFT"] is None
    assert record["setup"] == 'pip install "$WEFT"'
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RUN_DIRECTORY": str(tmp_path / "run")}
    first = calls(record["run"], tmp_path, SKYPILOT_NODE_RANK="0", **given)
    assert first[0] == f"weft train {tmp_path / 'run'} --prepare-only"
    assert "--node-rank 0 --master-addr 10.0.0.1 " in first[1]
    (other := tmp_path / "other").mkdir()
    [second] = calls(record["run"], other, SKYPILOT_NODE_RANK="1", **given)
    assert "--node-rank 1 --master-addr 10.0.0.1 " in second
    [loss] = emitted.losses
    assert str(loss) == (
        "lost: checkpoints, which each node keeps for its own ranks, as SkyPilot gives nodes no common folder"
        "; nearest: a URL as checkpoint.directory, or RUN_DIRECTORY in a mounted volume or bucket"
    )


@pytest.mark.parametrize("stack", ["slurm", "skypilot", "k8s"])
def test_a_file_started_anew_goes_on_from_its_storage(tmp_path: Path, stack: str) -> None:
    """It names the run, so another start of the same file finds the checkpoints."""
    job = two_nodes()

    def stored(steps: int) -> PlannedJob:
        tables = {"checkpoint": {"directory": "s3://bucket/runs"}, "train": {"steps": steps}}
        return replace(job, run=changed(job.run, tables))

    names = [files(Decided(stored(steps)))["run-id"] for steps in (10, 10, 20)]
    assert names[0] == names[1] != names[2]
    assert re.fullmatch(r"[0-9a-f]{32}\n", names[0])
    emitted = emit(stored(10), stack)
    assert names[0].strip() in emitted.text
    assert not any("checkpoints" in str(loss) for loss in emitted.losses)
    assert "run-id" not in files(Decided(job))


def test_all_nodes_of_a_skypilot_task_are_alike() -> None:
    with pytest.raises(InputError) as refused:
        emit(mixed(), "skypilot")
    assert str(refused.value) == (
        "--emit: all nodes of a SkyPilot task are alike, not 2 of 8 x a100-80gb and 1 of 8 x h100-80gb "
        "(nearest valid: slurm)"
    )


def manifests(job: PlannedJob) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in yaml.safe_load_all(emit(job, "k8s").text):
        found.setdefault(record["kind"], []).append(record)
    return found


@pytest.mark.parametrize("version", ["1.29", latest_version()])
def test_emitted_objects_keep_the_schemas_of_kubernetes(version: str) -> None:
    found = [manifests(one) for one in (two_nodes(), mixed(), elastic(two_nodes(), 1, 3))]
    for record in chain.from_iterable(chain.from_iterable(one.values() for one in found)):
        validate(record, version, strict=True)
    [broken] = found[0]["Job"]
    broken["spec"]["completion"] = 2
    with pytest.raises(ValidationError, match="'completion' was unexpected"):
        validate(broken, version, strict=True)


def test_kubernetes_gets_the_files_and_a_job_for_each_kind_of_node() -> None:
    job = mixed()
    found = manifests(job)
    [config], [service], [first, second] = found["ConfigMap"], found["Service"], found["Job"]
    assert config["data"] == files(Decided(job))
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"app": name}
    assert (first["spec"]["completions"], second["spec"]["completions"]) == (2, 1)
    containers = [one["spec"]["template"]["spec"]["containers"][0] for one in (first, second)]
    assert [one["image"] for one in containers] == ["", ""]
    scripts = [one["args"][0] for one in containers]
    assert "--prepare-only" in scripts[0]
    assert "--prepare-only" not in scripts[1]
    assert f'--node-rank "$JOB_COMPLETION_INDEX" --master-addr {name}-0.{name} ' in scripts[0]
    assert f"--node-rank $((JOB_COMPLETION_INDEX + 2)) --master-addr {name}-0.{name} " in scripts[1]
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=60)


def test_a_plan_that_no_config_map_holds_is_said_to_be_lost() -> None:
    job = planned(run_of("gpt2", on="40000xa100-80gb", global_batch=40000), dp=40000)
    [loss] = emit(job, "k8s").losses
    assert str(loss).startswith("lost: a plan of ")
    assert str(loss).endswith(
        "bytes in a ConfigMap, which holds 1048576; nearest: put run.toml and plan.json into the volume "
        "weft-runs"
    )


def test_nodes_have_every_rank_once_and_parts_of_nodes_are_their_own() -> None:
    job = planned(run_of(on="16xa100-80gb+8xh100-80gb", global_batch=40), dp=20)
    nodes = nodes_of(Decided(job))
    assert [(one.count, one.devices, one.first) for one in nodes] == [(2, 8, 0), (1, 4, 2)]


def test_files_that_nodes_need_are_said_to_be_lost(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[node]]\nname = "a"\ndevice = "t4"\ncount = 1\ndevices = 1\n')
    data = tmp_path / "texts"
    data.mkdir()
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\npreset = "gpt-1m"\n[task]\ndata = "{data}"\n'
        '[train]\nglobal_batch = 8\nprecision = "fp32"\n'
        f'[cluster]\nuse = "{cluster}"\n'
    )
    job = planned(load_run(path))
    lines = [str(loss) for loss in emit(job, "slurm").losses]
    assert lines == [f"lost: {data}, which all nodes must see; nearest: copy it along"]
    # The plan file carries the cluster, so that its file may stay behind.
    cluster.unlink()
    directory = tmp_path / "run"
    directory.mkdir()
    for name, text in files(Decided(job)).items():
        (directory / name).write_text(text)
    assert reopen(directory).problem.job.cluster == job.problem.job.cluster


@pytest.mark.parametrize(
    ("on", "name"),
    [("4xp100-16gb", "P100"), ("4xrtx-4090", "RTX4090"), ("8xa100-80gb", "A100-80GB"), ("4xl40s", "L40S")],
)
def test_accelerators_have_the_names_of_skypilots_catalogue(on: str, name: str) -> None:
    job = planned(run_of("gpt2", on=on, global_batch=8, precision="fp32"), dp=int(on[0]))
    accelerators = yaml.safe_load(emit(job, "skypilot").text)["resources"]["accelerators"]
    assert accelerators == f"{name}:{on[0]}"
