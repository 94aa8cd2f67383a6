"""Nodes that cost a job more than they give, and plans without them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from weft.cli.main import run as run_command
from weft.describe.run_file import parse_run
from weft.planning.fewer_nodes import better_without
from weft.planning.plan_file_job import plan_file_job
from weft.planning.planned import plan_run
from weft.progress import WorkDone


def planned(on: str, **tables: dict[str, object]):
    record = {"model": {"preset": "gpt-1m"}, "train": {"global_batch": 64}, "cluster": {"use": on}, **tables}
    return plan_run(parse_run(record))


def test_a_group_that_keeps_others_from_their_precision_is_named() -> None:
    slow = planned("8xt4+8xa100-80gb", model={"preset": "gpt2"}, train={})
    told: list[WorkDone] = []
    fewer = better_without(slow.run, slow, report=told.append)
    assert fewer is not None
    assert fewer.group == "t4"
    assert [(one.done, one.total) for one in told] == [(0, 2), (1, 2), (2, 2)]
    assert fewer.planned.plan.precision == "bf16"
    assert slow.plan.precision == "fp16"
    assert fewer.planned.plan.global_batch == slow.plan.global_batch
    assert fewer.saved == pytest.approx(1 - fewer.planned.prediction.step_s / slow.prediction.step_s)
    assert fewer.words in (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def test_groups_that_pay_are_kept_and_one_group_is_never_left_out() -> None:
    pins = {"schedule": "1f1b", "recompute": "none"}
    alone = planned("4xa100-80gb", plan=pins)
    assert better_without(alone.run, alone) is None
    large = planned("4xt4+4xa100-80gb", plan=pins)
    fewer = better_without(large.run, large)
    assert fewer is not None
    # What is found is what a run file with these words gets.
    words = {"use": "4xt4+4xa100-80gb", "without": [fewer.group]}
    assert planned("", cluster=words, plan=pins).plan == fewer.planned.plan
    with patch("weft.planning.fewer_nodes.MOST_DEVICES_SEARCHED", 7):
        assert better_without(large.run, large) is None
    # Two groups of equal nodes: without either of them the other one computes twice as much.
    both = planned(
        "2xa100-80gb+2xa100-80gb", model={"preset": "gpt2"}, train={"global_batch": 512}, plan=pins
    )
    assert both.plan.ranks == 4
    assert better_without(both.run, both) is None


def test_what_the_run_left_open_is_decided_again_and_what_it_leaves_out_stays_out() -> None:
    asked = {
        "model": {"preset": "gpt2"},
        "train": {"precision": "any", "global_batch": 64},
        "cluster": {"use": "2xt4+2xv100-16gb+4xa100-80gb", "without": ["v100-16gb"]},
        "plan": {"schedule": "1f1b", "recompute": "none"},
    }
    run = parse_run(asked)
    slow = plan_run(run)
    assert slow.run.train.precision == "fp16"
    fewer = better_without(run, slow)
    assert fewer is not None
    assert fewer.planned.plan.precision == "bf16"
    assert fewer.words.endswith("--without 'v100-16gb' --without 't4'")


def test_a_plan_without_nodes_is_kept_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt-1m", "--on", "8xt4+8xl4", "--global-batch", "64"]
    out = tmp_path / "plan.json"
    assert run_command([*words, "--without", "t4", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["better_without"] is None
    job = plan_file_job(out)
    assert [group.name for group in job.problem.job.cluster.groups] == ["l4"]
    assert job.plan.cluster == "8xt4+8xl4 without t4"
    assert run_command([*words, "--without", "t5"]) == 2
    assert "cluster.without: 't5' names no nodes of the cluster" in capsys.readouterr().err
