"""The weights of all replicas in a step, from a checkpoint before it and the logs of all ranks since.

The payloads pass through the function that ends a gather in training. So the weights have the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.describe.plan_versions import former_ids
from weft.errors import InputError, RunError, Violation
from weft.run.stage.build import build_stages
from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import STEPPED
from weft.run.state.synchroniser_state import REPLICAS
from weft.sync import get_synchroniser
from weft.sync.base import Gatherer
from weft.training.checkpoint.checkpoints import rank_tensor
from weft.training.checkpoint.manifest import CHECKPOINTS, generations, verify
from weft.training.checkpoint.tensor_folders import SafetensorsFolder, Shape
from weft.training.checkpoint.training_state import read_state
from weft.training.checkpoint.weight_log import LOG, LoggedPayload, RankLog, read_log


class ReplayedFolder:
    """The tensors of a checkpoint, a `TensorFolder`, with replayed weights in place of stepped ones."""

    def __init__(self, folder: SafetensorsFolder, weights: Mapping[str, torch.Tensor]) -> None:
        self.path = folder.path
        self._folder = folder
        self._weights = weights
        self.shapes: Mapping[str, Shape] = folder.shapes

    def read(self, name: str) -> torch.Tensor:
        found = self._weights.get(name)
        return self._folder.read(name) if found is None else found


@dataclass(frozen=True, slots=True)
class Replayed:
    """The weights of a step, the checkpoint that they begin with, and one line for each skipped one."""

    folder: ReplayedFolder
    checkpoint: str
    skipped: tuple[str, ...]


def replay(run_dir: Path, plan: Plan, config: ModelConfig, step: int) -> Replayed:
    """Return the weights with which all replicas of a run compute a step, counted from 0.

    It begins with the newest whole checkpoint whose step is at most `step`.

    Raises:
        InputError: if there is no such checkpoint, logs or payloads are missing, or another plan made them.
        RunError: if a file cannot be read.
    """
    begins, path, skipped = _checkpoint(run_dir / CHECKPOINTS, step)
    plan_ids = {plan.plan_id, *former_ids(plan)}
    saved_by = read_state(path).plan_id
    if saved_by not in plan_ids:
        problem = f"saved by plan {saved_by}; the run's log is of plan {plan.plan_id}"
        raise InputError(Violation(str(path), problem))
    logs = _logs(run_dir / LOG, begins, plan_ids)
    gatherer = get_synchroniser(plan.sync)
    assert isinstance(gatherer, Gatherer), "a log says that replicas gather weights in a form of their own"
    folder, weights = SafetensorsFolder(path), dict[str, torch.Tensor]()
    for stage in range(len(plan.stages)):
        ranks = _sharers(run_dir / LOG, logs, stage)
        flat = torch.cat([folder.read(rank_tensor(rank, REPLICAS, f"shown/{stage}")) for rank in ranks])
        shown = int(folder.read(rank_tensor(ranks[0], REPLICAS, f"steps/{stage}"))[0])
        payloads = _payloads(run_dir / LOG, logs, ranks, stage, range(shown + 1, step + 1))
        roll_forward(flat, gatherer, payloads)
        module = build_stages(plan, config, ranks[0], 0, STEPPED[plan.precision])[stage]
        weights |= _named(module, FlatLayout.of(module, len(ranks)), flat)
    return Replayed(ReplayedFolder(folder, weights), path.name, tuple(skipped))


def roll_forward(flat: torch.Tensor, gatherer: Gatherer, payloads: Sequence[Sequence[LoggedPayload]]) -> None:
    """Bring a stage's weights, shape (n,), up to date from payloads, by step and by the ranks' places."""
    for of_step in payloads:
        gatherer.take_in(flat, torch.stack([one.read() for one in of_step]))


def unlogged_tensors(module: nn.Module, layout: FlatLayout) -> list[str]:
    """Return the names of a stage's tensors that training changes and gathers of its layout do not send."""
    sent = {id(parameter) for parameter in layout.parameters}
    return [
        name
        for name, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) not in sent and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))
    ]


def _named(module: nn.Module, layout: FlatLayout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    views = dict(zip(layout.parameters, layout.views(flat), strict=True))
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: views[parameter] for name, parameter in parameters if parameter in views}


def _checkpoint(directory: Path, step: int) -> tuple[int, Path, list[str]]:
    """Return the newest whole checkpoint whose step is at most `step`, and a line for each skipped one."""
    found, skipped = generations(directory), list[str]()
    for saved, path in found:
        if saved <= step:
            try:
                verify(path)
                return saved, path, skipped
            except (RunError, OSError) as error:
                skipped.append(str(error))
    if skipped:
        raise RunError(f"no checkpoint to replay from: {'; '.join(skipped)}")
    if not found:
        raise InputError(Violation(str(directory), "no checkpoint yet"))
    oldest = found[-1][0]
    raise InputError(Violation(str(directory), f"no checkpoint before step {step}", str(oldest)))


def _logs(folder: Path, begins: int, plan_ids: Collection[str]) -> dict[int, RankLog]:
    """Return the logs by rank since the checkpoint of step `begins`, each joined over its files."""
    logs: dict[int, RankLog] = {}
    for since, path in reversed(generations(folder)):
        for file in sorted(path.glob("*.log")) if since >= begins else ():
            log = read_log(file)
            if log is None:
                continue
            rank, plan_id = log.header.rank, log.header.plan_id
            if plan_id not in plan_ids:
                raise InputError(Violation(str(file), f"of plan {plan_id}, not of the run's plan"))
            if rank in logs:
                log = RankLog(log.header, {**logs[rank].payloads, **log.payloads})
            logs[rank] = log
    if not logs:
        problem = f"no log since the checkpoint of step {begins}; a run keeps one if its file says so"
        raise InputError(Violation(str(folder), problem, "checkpoint.weight_log = true"))
    return logs


def _sharers(folder: Path, logs: Mapping[int, RankLog], stage: int) -> list[int]:
    """Return the ranks that share a stage, in the order of their places."""
    places = {log.header.places[stage]: rank for rank, log in logs.items() if stage in log.header.places}
    size = max((size for _, size in places), default=0)
    if not places or len(places) < size:
        raise InputError(
            Violation(str(folder), f"stage {stage}: {len(places)} of {size or 'all'} ranks' logs")
        )
    return [places[place] for place in sorted(places)]


def _payloads(
    folder: Path, logs: Mapping[int, RankLog], ranks: Sequence[int], stage: int, steps: range
) -> list[list[LoggedPayload]]:
    for step in steps:
        for rank in ranks:
            if (step, stage) not in logs[rank].payloads:
                problem = f"rank {rank} has no whole record of step {step}, stage {stage}"
                raise InputError(Violation(str(folder), problem, str(step - 1)))
    return [[logs[rank].payloads[step, stage] for rank in ranks] for step in steps]
