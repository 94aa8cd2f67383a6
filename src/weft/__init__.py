"""weft plans, predicts, runs and watches the training of large models, micro-batch by micro-batch.

    plan = weft.plan(model="gpt-1m", on="this-machine", global_batch=32)
    run = weft.train(plan, data="python-stdlib", steps=100)
    run.compare()

Importing weft is quick and does not import torch; public names load when they are first used.
"""

from __future__ import annotations

# Read by type checkers alone; `typing` takes long to import, and until then Ctrl-C prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from weft.api import Planned, Run, evaluate, plan, simulate, train
    from weft.capture.block_model import BlockModel
    from weft.capture.graphs.captured import CapturedModel
    from weft.describe.cluster import Cluster
    from weft.describe.plan import Plan
    from weft.errors import InputError, RunError
    from weft.run.own_loop import Runtime
    from weft.run.placed_model import PlacedDevice, PlacedModel
    from weft.timeline.timeline import Timeline

__version__ = "0.1.0"

_PUBLIC = {
    "BlockModel": "weft.capture.block_model",
    "CapturedModel": "weft.capture.graphs.captured",
    "Cluster": "weft.describe.cluster",
    "InputError": "weft.errors",
    "PlacedDevice": "weft.run.placed_model",
    "PlacedModel": "weft.run.placed_model",
    "Plan": "weft.describe.plan",
    "Planned": "weft.api",
    "Run": "weft.api",
    "RunError": "weft.errors",
    "Runtime": "weft.run.own_loop",
    "Timeline": "weft.timeline.timeline",
    "evaluate": "weft.api",
    "plan": "weft.api",
    "simulate": "weft.api",
    "train": "weft.api",
}

__all__ = [
    "BlockModel",
    "CapturedModel",
    "Cluster",
    "InputError",
    "PlacedDevice",
    "PlacedModel",
    "Plan",
    "Planned",
    "Run",
    "RunError",
    "Runtime",
    "Timeline",
    "__version__",
    "evaluate",
    "plan",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
