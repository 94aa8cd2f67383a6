"""A task for tests of late ranks: rank 1 stops itself in the middle of the load of a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from weft.training.checkpoint import tensor_storage
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.text import CausalLanguageModelling


class StopsInLoad(CausalLanguageModelling):
    """The process that stops leaves its number in $STOPPED."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)

        def stop(*_: object) -> None:
            Path(os.environ["STOPPED"]).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        if os.environ["RANK"] == "1":
            tensor_storage._Planner.commit_tensor = stop
