"""Frozen weights, which checkpoints lack: a run begins with them at every start.

They come from the run's folder of weights, or are drawn from its seed.
"""

from __future__ import annotations

from pathlib import Path

from weft.describe.layer_graph import LayerGraph
from weft.describe.run_file import RunFile
from weft.training.interchange.weight_files import weight_fingerprint


def weights_folder(run: RunFile) -> Path | None:
    """Return the folder that a run takes its first weights from; None if it draws them."""
    if run.model.hf is None or not run.model.weights:
        return None
    path = Path(run.model.hf)
    return path if path.is_dir() else path.parent


def frozen_fingerprint(run: RunFile, graph: LayerGraph) -> str:
    """Return the fingerprint of the folder with a run's frozen weights; empty without such a folder.

    Raises:
        InputError: if the folder has no weights, or a file is not of safetensors.
    """
    folder = weights_folder(run) if graph.has_frozen_layers else None
    return "" if folder is None else weight_fingerprint(folder)
