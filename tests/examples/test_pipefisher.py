"""The studies of K-FAC in bubbles: grids that grow, figures of curves, and a quick run."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import importable_from

FOLDER = Path(__file__).parents[2] / "examples" / "pipefisher"


@pytest.fixture
def studies() -> Iterator[ModuleType]:
    with importable_from(FOLDER):
        yield importlib.import_module("studies")


class Bowl:
    """Ranks whose losses are least at one rate and damping, whatever the plan."""

    def __init__(self, rate: float, damping: float, longest: float = math.inf) -> None:
        self.rate, self.damping, self.longest = rate, damping, longest
        self.seeds: set[int] = set()

    def __call__(self, all_ranks: Sequence[Any], trainings: Sequence[Any]) -> list[Any]:
        curve = importlib.import_module("trainings").Curve
        self.seeds |= {one.seed for one in trainings}
        return [curve([self.loss(one.arm)] * one.steps, [0.0] * one.steps) for one in trainings]

    def loss(self, arm: Any) -> float:
        if arm.rate > self.longest:
            return math.inf
        away = abs(math.log(arm.rate / self.rate))
        return away if arm.damping is None else away + abs(math.log(arm.damping / self.damping))


def tuned(studies: ModuleType, bowl: Bowl, growths: int, dampings: tuple[float, ...] = ()) -> Any:
    studies.train_beside = bowl
    grid = studies.Grid(studies.Arm("adamw", 0.0), (1e-3, 3e-3, 9e-3), dampings)
    return studies.tune(grid, None, studies.Effort(10, 2, 5, growths, (), 1), [])


def test_a_grid_grows_until_its_best_point_is_inside(studies: ModuleType) -> None:
    bowl = Bowl(0.1, 1e-3)
    found = tuned(studies, bowl, 9)
    assert found.inside
    assert found.arm.rate == pytest.approx(0.081)
    assert max(rate for rate, _, _ in found.tried) == pytest.approx(0.243)
    assert not bowl.seeds & set(range(100)), "seeds that tune are not reported"
    assert not tuned(studies, bowl, 1).inside


def test_a_grid_of_two_grows_in_both(studies: ModuleType) -> None:
    found = tuned(studies, Bowl(0.02, 1e-5), 9, (1e-3, 3e-3))
    assert found.inside
    assert found.arm.rate == pytest.approx(0.027)
    assert found.arm.damping == pytest.approx(1.2e-5, rel=0.1)


def test_rates_that_diverge_are_never_best(studies: ModuleType) -> None:
    found = tuned(studies, Bowl(1.0, 1e-3, longest=0.05), 9)
    assert found.inside
    assert found.arm.rate == pytest.approx(0.027)


def test_steps_to_a_loss_are_counted_seed_by_seed(studies: ModuleType) -> None:
    def finalist(losses: list[list[float]]) -> Any:
        return studies.Finalist(studies.Arm("adamw", 1.0), "one process", [], True, losses, 0.0)

    goal = finalist([[3.0, 3.0, *[2.0] * 5], [3.0, 3.0, *[1.0] * 5]])
    # One low loss of a noisy curve is not enough.
    found = finalist([[4.0, 0.5, 4.0, 1.0, 1.0, 1.0, 1.0], [4.0, 3.0, 0.5, 1.5, 1.2, 1.1, 1.0]])
    assert goal.finals == [2.0, 1.0]
    assert goal.steps_to(goal) == [7, 7]
    assert found.steps_to(goal) == [6, None]
    assert studies.spread(found.steps_to(goal), 0) == "1 of 2 seeds"
    assert studies.spread([2, 4], 0) == "3 (2 to 4)"
    assert studies.spread([None], 0) == "never"


@pytest.mark.examples
@pytest.mark.processes
def test_a_quick_study_trains_pipelines_with_work_in_their_bubbles(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    command = [sys.executable, FOLDER / "digits.py", "--quick", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {(one["arm"]["optimizer"], one["where"]): one for one in json.loads(path.read_text())}
    serial, piped = found["nvlamb", "one process"], found["nvlamb", "2 ranks"]
    assert all(one["finals"][0] < one["losses"][0][0] for one in found.values())
    assert serial["age"] < piped["age"] < 6.0
    assert "K-FAC + nvlamb, 2 ranks, to one process by seed" in done.stdout


@pytest.mark.examples
def test_arms_of_other_packages_begin_with_the_weights_of_own_ones() -> None:
    """AdamW of torch in the place of a peer: its losses are those of weft's training, step by step."""
    with importable_from(FOLDER), TemporaryDirectory() as folder:
        peers, trainings, digits = (importlib.import_module(one) for one in ("peers", "trainings", "digits"))
        arm = trainings.Arm("adamw", 3e-3)

        def made(model: torch.nn.Module, arm: Any) -> tuple[Any, Any]:
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
            return optimizer.step, lambda rate: peers.set_rate(optimizer, rate)

        study = digits.study_in(Path(folder))
        training = trainings.Training(arm, study.plan(arm, 1, 4).plan, 4, seed=7)
        [own] = peers.Peers({"adamw": made}).train([training])
        with trainings.Ranks(study.job, 1) as ranks:
            [of_weft] = ranks.train([training])
    assert own.losses == pytest.approx(of_weft.losses, rel=1e-5)
    assert own.losses[-1] < own.losses[0]
