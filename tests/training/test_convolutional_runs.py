"""Runs of a residual network: checkpoints and evaluations of replicas are those of one process."""

from pathlib import Path

import pytest
import torch
from hugging_face_jobs import model_folder, result_of, run_training, small, write_run
from pool import WorkerPool
from safetensors.torch import load_file

pytestmark = pytest.mark.processes


def checkpoint_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    return {name: value for name, value in tensors.items() if not name.startswith("optimizer/")}


def test_replicas_save_and_evaluate_the_statistics_of_one_process(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model", small("resnet"))
    layouts = {
        "alone": {"pp": 1, "dp": 1, "micro_batches": 4},
        "replicas": {"pp": 1, "dp": 2, "micro_batches": 2},
    }
    for name, layout in layouts.items():
        plan = write_run(tmp_path / name, folder, tmp_path, precision="fp64", weights=False, **layout)
        codes = worker_pool.run(run_training, tmp_path / name, plan, ranks=plan.ranks)
        assert codes == [0] * plan.ranks
    found, expected = result_of(tmp_path / "replicas"), result_of(tmp_path / "alone")
    assert found["final_loss"] == pytest.approx(expected["final_loss"], rel=1e-9)
    for step in (2, 4):
        ours, theirs = (checkpoint_of(tmp_path / name, step) for name in ("replicas", "alone"))
        assert ours.keys() == theirs.keys()
        assert any(name.endswith("running_var") for name in ours)
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-11)
