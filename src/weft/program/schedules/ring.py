"""The ring of looped schedules: stage s lives on device s mod P; the last loop may be ragged."""

from __future__ import annotations

import numpy as np

from weft.program.program import Ints
from weft.program.schedules.base import Pipeline


def ring_placement(pipeline: Pipeline) -> Ints:
    """Device of each stage, shape (stages,)."""
    return np.arange(pipeline.stages, dtype=np.int64) % pipeline.devices


def local_stages(pipeline: Pipeline, device: int) -> Ints:
    """The stages of one device, first loop first."""
    return np.arange(device, pipeline.stages, pipeline.devices, dtype=np.int64)


def refuse_idle_devices(name: str, pipeline: Pipeline) -> str | None:
    """Why a ring with fewer stages than devices is no pipeline, or None."""
    if pipeline.stages >= pipeline.devices:
        return None
    return (
        f"{name} needs a stage for every device, not {pipeline.stages} stages on {pipeline.devices} devices"
    )


def refuse_loops(name: str, pipeline: Pipeline) -> str | None:
    """Why a schedule of one stage per device cannot run this pipeline, or None."""
    if pipeline.stages == pipeline.devices:
        return None
    return f"{name} runs one stage per device, not {pipeline.stages} stages on {pipeline.devices} devices"
