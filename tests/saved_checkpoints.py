"""A checkpoint written at once, without the saver's thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.training.checkpoint.checkpoints import collect, write
from weft.training.checkpoint.manifest import generation_path
from weft.training.checkpoint.training_state import TrainingState


def save_checkpoint(directory: Path, state: TrainingState, *parts: Any, keep: int) -> Path:
    """Write all ranks' stages, optimizers, shards and methods, `parts`; every rank calls it."""
    write(directory, state, collect(*parts), keep=keep)
    return generation_path(directory, state.step)
