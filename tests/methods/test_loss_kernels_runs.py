"""Runs whose ranks divide the experts and compute the loss in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hugging_face_jobs import result_of
from pool import WorkerPool
from pooled_runs import trained

RUN = """
[model]
preset = "mixtral-1m"
[task]
data = "{folder}/text.txt"
sequence = 16
[train]
global_batch = 4
steps = 2
[plan]
pp = 1
dp = 1
ep = 2
micro_batch_size = 2
loss = "{loss}"
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_expert_ranks_train_with_a_loss_in_chunks(tmp_path: Path, worker_pool: WorkerPool) -> None:
    (tmp_path / "text.txt").write_text("The sheep of the hills are counted twice. " * 100)
    lasts = []
    for loss in ("whole", "chunked"):
        (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path, loss=loss))
        result = result_of(trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / loss))
        assert result["final_loss"] < result["first_loss"]
        lasts.append(result["final_loss"])
    assert lasts[0] == pytest.approx(lasts[1], rel=1e-5)
