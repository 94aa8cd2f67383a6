"""Runs with an auxiliary head: told, resumed to the same bits under another plan, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from asked_methods import with_head
from pool import WorkerPool
from safetensors.torch import load_file
from stopped_runs import saved, text_run, through_and_stopped

from weft.cli.main import run
from weft.describe.models import resolve_model
from weft.run.stage.build import build_stage
from weft.training.interchange.imports import read_initial_weights

RUN = """
then = { at_step = 1, pp = 1, dp = 2, micro_batch_size = 1, schedule = "1f1b" }
[auxiliary-head]
after_block = 2
weight = 0.3
"""
HEAD = {"auxiliary_head.norm.weight", "auxiliary_head.norm.bias", "auxiliary_head.product.weight"}


def losses(directory: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["auxiliary_loss"]) for row in rows]


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_head_moves_with_the_plan_resumes_to_the_same_bits_and_is_not_exported(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    whole, parts = through_and_stopped(
        worker_pool, tmp_path, text_run(tmp_path, RUN, steps=3), steps=3, stop=2
    )
    assert losses(parts) == losses(whole)
    assert len({other for _, other in losses(whole)}) == 3
    kept = saved(whole)
    assert kept.keys() >= HEAD | {f"optimizer/{name}/exp_avg" for name in HEAD}
    # The later plan went on with the head that the first one had trained.
    for name in HEAD:
        before = saved(whole, 0)[name]
        assert 0.0 < (kept[name] - before).abs().max() < 1e-3
    assert '<section id="auxiliary-head"' in (parts / "report.html").read_text()

    assert run(["export", str(whole), str(tmp_path / "out")]) == 0
    exported = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert not any("auxiliary" in name for name in exported)
    begins_from(tmp_path / "out", exported)


def begins_from(folder: Path, exported: dict[str, Any]) -> None:
    """What is no part of the model keeps its initial values where the model's weights come from a folder."""
    config = resolve_model(str(folder), sequence=16)
    stage, fresh = (build_stage(config, range(6), 7, torch.float32, methods=[with_head(2)]) for _ in range(2))
    read_initial_weights(folder, config, {0: stage})
    given, drawn = stage.state_dict(), fresh.state_dict()
    assert all(torch.equal(given[name], drawn[name]) for name in HEAD)
    assert torch.equal(given["transformer.h.1.mlp.c_fc.weight"], exported["transformer.h.1.mlp.c_fc.weight"])
