"""The variables of torchrun from those of a Slurm step."""

from __future__ import annotations

import pytest

from weft.run.launch.slurm_step import torchrun_variables

STEP = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NODELIST": "gpu[03-04],big1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_ID": "1234567",
}


def test_a_task_has_its_rank_and_meets_on_the_first_node() -> None:
    assert torchrun_variables(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "30067",
    }


@pytest.mark.parametrize(
    ("node", "tasks", "local"), [("0", "4(x2),3", "4"), ("1", "4(x2),3", "4"), ("1", "2,1", "1")]
)
def test_tasks_of_a_node_are_counted_in_runs(node: str, tasks: str, local: str) -> None:
    step = {**STEP, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert torchrun_variables(step)["LOCAL_WORLD_SIZE"] == local


def test_what_is_set_is_kept_and_outside_of_steps_nothing_is_said() -> None:
    assert torchrun_variables({**STEP, "MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"
    assert torchrun_variables({"SLURM_JOB_ID": "1", "PATH": "/bin"}) == {}
