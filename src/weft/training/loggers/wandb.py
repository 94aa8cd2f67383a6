"""Weights & Biases, or any module with its `init`, `log` and `finish` (swanlab, a user's own)."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from weft.files import write_whole
from weft.training.loggers.feed import Opening, Record

PROJECT = "weft"
# The file with the service's id of the run, under which a resumed run continues.
RUN_ID = "wandb-run-id"


class WandbLogger:
    """A logger to a service, set by the service's environment variables (WANDB_MODE, WANDB_PROJECT, ...).

    Args:
        module: a module with wandb's interface; its `init` gets only arguments that it knows.
    """

    def __init__(self, module: str, opening: Opening) -> None:
        self._module: Any = importlib.import_module(module)
        path = opening.run_dir / RUN_ID
        run = self._module.init(**_arguments(self._module, opening, path))
        identity = getattr(run, "id", None)
        if isinstance(identity, str) and not path.exists():
            write_whole(path, identity + "\n")

    def log(self, record: Record) -> None:
        self._module.log(figures_of(record), step=int(record["step"]))

    def flush(self) -> None:
        """Do nothing: the module sends by itself."""

    def finish(self) -> None:
        self._module.finish()


def figures_of(record: Record) -> dict[str, float]:
    """Return a record without its step and its time, which services keep in their own way."""
    return {name: value for name, value in record.items() if name not in ("step", "time_s")}


def description_of(opening: Opening) -> dict[str, Any]:
    """Return the arguments of `init` that describe a run."""
    return {
        # The argument would override wandb's own variable.
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": opening.run_dir.name,
        "config": dict(opening.config),
    }


def _arguments(module: Any, opening: Opening, id_path: Path) -> dict[str, Any]:
    arguments = {**description_of(opening), "dir": str(opening.run_dir), "resume": "allow"}
    if module.__name__ == "wandb":
        # Console capture would take over the worker's log.
        arguments["settings"] = {"console": "off"}
    if id_path.exists():
        arguments["id"] = id_path.read_text().strip()
    parameters = inspect.signature(module.init).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
