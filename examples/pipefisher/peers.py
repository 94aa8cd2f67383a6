"""The autoencoder of digits with other packages' second-order optimizers, in one process.

python peers.py [--quick] [--json FILE]

These are SOAP and KL-Shampoo of heavyball, and K-FAC of kfac-pytorch in front of SGD (KAISA; Pauloski et al.,
SC 2021). Get them with `pip install heavyball`, and `pip install` of a clone of
https://github.com/gpauloski/kfac-pytorch; one that is absent is left out. Weights begin as those of
`digits.py`, and learning rates and dampings are tuned as there. All other options are the packages' own, but
for inverses every three steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from autoencoder import SIZES, Digits
from digits import EVERY, FULL, QUICK, study_in
from studies import Finalist, Grid, as_json, spread, tune
from torch import nn
from trainings import NO_LOSS, Arm, Curve, Training

from weft.describe.models import resolve_model
from weft.run.stage.build import build_stages
from weft.training.tasks.base import TaskSettings

# Makes what runs behind each backward pass.
Made = Callable[[nn.Module, Arm], tuple[Callable[[], object], Callable[[float], None]]]


class Peers:
    """Trains arms of other packages, in the place of weft's ranks."""

    def __init__(self, made: Mapping[str, Made]) -> None:
        self._made = made
        self._task = Digits(TaskSettings(data="", sequence=0, vocabulary=0, cache=Path()))

    def train(self, trainings: Iterable[Training]) -> list[Curve]:
        return [self._trained(one) for one in trainings]

    def _trained(self, training: Training) -> Curve:
        arm, settings = training.arm, training.arm.settings(training.steps)
        model = network(training)
        step, set_rate = self._made[arm.optimizer](model, arm)
        pixels, _ = self._task.batch(np.arange(self._task.samples))
        losses: list[float] = []
        for number in range(training.steps):
            set_rate(settings.rate(number))
            model.zero_grad()
            loss = self._task.loss(model(pixels), pixels)
            loss.backward()
            losses.append(loss.item())
            if not np.isfinite(losses[-1]):
                break
            step()
        return Curve([*losses, *[NO_LOSS] * (training.steps - len(losses))], [])


def network(training: Training) -> nn.Module:
    """The autoencoder with the initial weights of weft's training with this seed."""
    config = resolve_model("autoencoder:build")
    [stage] = build_stages(training.plan, config, 0, training.seed, torch.float32).values()
    layers: list[nn.Module] = []
    for inner, columns in pairwise(SIZES):
        layers += [nn.Linear(inner, columns), nn.Tanh()]
    made = nn.Sequential(*layers[:-1])
    for own, weft_own in zip(made.parameters(), stage.parameters(), strict=True):
        own.data.copy_(weft_own.detach())
    return made


def of_heavyball(name: str) -> Made:
    """An optimizer of heavyball, without its compilation of kernels."""
    import heavyball

    heavyball.utils.compile_mode = None

    def made(model: nn.Module, arm: Arm) -> tuple[Callable[[], object], Callable[[float], None]]:
        optimizer = getattr(heavyball, name)(
            model.parameters(), lr=arm.rate, weight_decay=arm.decay, compile_step=False
        )
        return optimizer.step, lambda rate: set_rate(optimizer, rate)

    return made


def of_kfac_pytorch(model: nn.Module, arm: Arm) -> tuple[Callable[[], object], Callable[[float], None]]:
    """K-FAC of kfac-pytorch, and SGD with momentum."""
    from kfac.preconditioner import KFACPreconditioner

    optimizer = torch.optim.SGD(model.parameters(), lr=arm.rate, momentum=0.9)
    preconditioner = KFACPreconditioner(
        model,
        factor_update_steps=EVERY,
        inv_update_steps=EVERY,
        damping=arm.damping,
        lr=lambda _: optimizer.param_groups[0]["lr"],
    )

    def step() -> None:
        preconditioner.step()
        optimizer.step()

    return step, lambda rate: set_rate(optimizer, rate)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def known() -> tuple[dict[str, Made], list[Grid]]:
    """The packages that are there, and the points to try first."""
    made: dict[str, Made] = {}
    grids = []
    if find_spec("heavyball"):
        made |= {"soap": of_heavyball("SOAP"), "kl-shampoo": of_heavyball("KLShampoo")}
        grids += [Grid(Arm(name, 0.0), (3e-3, 9e-3, 2.7e-2)) for name in made]
    if find_spec("kfac"):
        made["sgd of kfac-pytorch"] = of_kfac_pytorch
        grids.append(Grid(Arm("sgd of kfac-pytorch", 0.0), (1e-2, 3e-2, 9e-2), (1e-4, 1e-3, 1e-2)))
    return made, grids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of one point each")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    effort = QUICK if given.quick else FULL
    made, grids = known()
    found: list[Finalist] = []
    with tempfile.TemporaryDirectory() as folder:
        plan = study_in(Path(folder)).plan(Arm("adamw", 0.0), 1, effort.steps).plan
        peers = Peers(made)
        for grid in shortened(grids) if given.quick else grids:
            tuned = tune(grid, plan, effort, [peers])
            found.append(Finalist.of(tuned, "one process", peers.train(tuned.reported(plan, effort))))
            print(f"{found[-1].label}: {tuned.arm}: {spread(found[-1].finals, 4)}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(found)))


def shortened(grids: Sequence[Grid]) -> list[Grid]:
    return [Grid(one.arm, one.rates[:1], one.dampings[:1]) for one in grids]


if __name__ == "__main__":
    main()
