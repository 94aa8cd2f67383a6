"""torchtitan from 0.3 on: its configuration manager reads the module that the launch line names, the meshes
of as many ranks are described, the model is built without memory, and the schedule is made for its stages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from answering import answer
from launched import CHOSEN, program_of, ranks_started, started
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims


def check(file: Path, case: Mapping[str, Any]) -> None:
    ranks = ranks_started(case["launch"])
    if ranks != case["ranks"]:
        raise ValueError(f"torchrun starts {ranks} ranks, the plan has {case['ranks']}")
    words = started(case["launch"], "torchrun", {"NODE_RANK": "0", "MASTER_ADDR": "localhost"})
    os.environ.update(CHOSEN)
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    try:
        config = ConfigManager().parse_args(program_of(words, "torchtitan.train"))
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.pop(file.stem, None)
    sizes = ParallelDims.from_config(config.parallelism, ranks)
    replicas = sizes.dp_replicate * sizes.dp_shard
    local, batch = config.training.local_batch_size, config.training.global_batch_size
    if batch % (local * replicas):
        raise ValueError(f"{batch} samples are no multiple of {local} on each of {replicas} replicas")
    spec = config.model_spec.model
    spec.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.build()
    held = sum(parameter.numel() for parameter in model.parameters())
    if held != case["parameters"]:
        raise ValueError(f"the model has {held} parameters, the plan's {case['parameters']}")
    if sizes.pp > 1:
        stages_are_whole(model, config.parallelism.module_fqns_per_model_part)
        schedule_is_made(config.parallelism, local)


def stages_are_whole(model: torch.nn.Module, parts: list[list[str]]) -> None:
    """Every module that stages name exists, and every one of the model is in a stage."""
    named = [name for part in parts for name in part]
    children = {name for name, _ in model.named_children() if name not in ("layers", "rope")}
    wanted = children | {f"layers.{name}" for name, _ in model.layers.named_children()}
    if set(named) != wanted or len(named) != len(wanted):
        raise ValueError(f"stages hold other modules than the model: {sorted(set(named) ^ wanted)}")


def schedule_is_made(parallelism: Any, local: int) -> None:
    """torch's own schedule for the stages of the first device, and for as many micro-batches."""
    devices, parts = parallelism.pipeline_parallel_degree, parallelism.module_fqns_per_model_part
    made = get_schedule_class(parallelism.pipeline_parallel_schedule)
    looped = issubclass(made, PipelineScheduleMulti)
    loops, rest = divmod(len(parts), devices)
    if rest or (loops > 1) != looped:
        raise ValueError(f"{made.__name__} for {len(parts)} stages on {devices} devices")
    stages = [_stage(index, len(parts), devices) for index in range(0, len(parts), devices)]
    count = local // parallelism.pipeline_parallel_microbatch_size
    made(stages if looped else stages[0], n_microbatches=count, loss_fn=None)


def _stage(index: int, stages: int, devices: int) -> MagicMock:
    """As much of a stage as schedules look at."""
    stage = MagicMock(stage_index=index, num_stages=stages, group_size=devices, group_rank=0)
    stage.is_first, stage.is_last = index == 0, index == stages - 1
    stage.stage_index_to_group_rank = {number: number % devices for number in range(stages)}
    return stage


if __name__ == "__main__":
    answer(version("torchtitan"), check)
