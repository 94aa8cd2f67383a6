"""DeepSpeed: `DeepSpeedConfig`, which checks batches and sections, on as many replicas as the plan has.

The class asks a mesh for their number. The optimizer is made by its name, which is one of the engine's or
torch's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from answering import answer
from deepspeed.runtime import config
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig


class Mesh:
    """As much of a mesh of devices as the configuration asks for."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self.replicas


def check(file: Path, case: Mapping[str, Any]) -> None:
    record = json.loads(file.read_text())
    config.dist.get_rank = lambda: 0
    read = DeepSpeedConfig(record, mpu=Mesh(case["replicas"]))
    if read.optimizer_name not in (*DEEPSPEED_OPTIMIZERS, *vars(torch.optim)):
        raise ValueError(f"optimizer {read.optimizer_name} is none of the engine's and none of torch's")


if __name__ == "__main__":
    answer(deepspeed.__version__, check)
