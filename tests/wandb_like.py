"""A module with wandb's interface, as small as such modules come: what it was told is in `CALLS`."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[str, Any]] = []


def init(project: str, name: str, config: dict[str, Any]) -> None:
    CALLS.append(("init", {"project": project, "name": name, "config": config}))


def log(metrics: dict[str, float], step: int) -> None:
    CALLS.append(("log", (step, metrics)))


def finish() -> None:
    CALLS.append(("finish", None))
