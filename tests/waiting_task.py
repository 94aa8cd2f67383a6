"""A task for tests of runs that are under way: from a step on, rank 0 waits for a file.

Beside that file each rank writes the number of its process, `pid-RANK`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch

from weft.training.tasks.base import TaskSettings
from weft.training.tasks.text import CausalLanguageModelling


class Waits(CausalLanguageModelling):
    """Training samples of rank 0 from number $WAIT_FROM on wait until the file $GO_ON exists."""

    # It acts by rank, so every rank reads.
    mapped = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self._left = int(os.environ["WAIT_FROM"])
        Path(os.environ["GO_ON"]).with_name(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out and os.environ["RANK"] == "0":
            self._left -= len(samples)
            while self._left < 0 and not Path(os.environ["GO_ON"]).exists():
                time.sleep(0.05)
        return super().batch(samples, held_out=held_out)
