"""SkyPilot: the task is read and validated, and its accelerator must be one of the catalogue's names.

The catalogue comes from the internet, or from `~/.sky/catalogs` where it has been fetched before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sky
import yaml
from answering import answer
from sky.utils import accelerator_registry


def check(file: Path, case: Mapping[str, Any]) -> None:
    # The file asks from where weft is installed.
    task = sky.Task.from_yaml_config(yaml.safe_load(file.read_text()), env_overrides=[("WEFT", "weft")])
    task.validate()
    known = set(accelerator_registry._accelerator_df["AcceleratorName"])
    ranks = 0
    for resources in task.resources:
        accelerators = resources.accelerators or {}
        if unknown := set(accelerators) - known:
            raise ValueError(f"{', '.join(unknown)}: no name of the catalogue")
        ranks += task.num_nodes * sum(accelerators.values())
    if ranks and ranks < case["ranks"]:
        raise ValueError(f"{ranks} accelerators for {case['ranks']} ranks")


if __name__ == "__main__":
    answer(sky.__version__, check)
