"""Tasks for tests of reads: each leaves its process and the samples that it reads beside the text."""

from __future__ import annotations

import json
import os
from pathlib import Path

from weft.program.arrays import Ints
from weft.run.workspace import Samples
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.text import CausalLanguageModelling

READ = "read.jsonl"


class Logged(CausalLanguageModelling):
    """One rank of a node reads a micro-batch."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        assert isinstance(settings.data, str)
        self._read = Path(settings.data).with_name(READ)

    def batch(self, samples: Ints, *, held_out: bool = False) -> Samples:
        with self._read.open("a", encoding="utf-8") as file:
            file.write(json.dumps([os.getpid(), held_out, samples.tolist()]) + "\n")
        return super().batch(samples, held_out=held_out)


class LoggedByAll(Logged):
    """Every rank reads what it needs."""

    mapped = True
