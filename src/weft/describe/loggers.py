"""The loggers that weft knows by name, and their required packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from weft.errors import InputError, Violation, nearest

# For each logger, the packages that can do its work; one of them is enough. Empty: no package is needed.
KNOWN_LOGGERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"csv": (), "tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
)
_OWN = re.compile(r"wandb:([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)")


def wandb_module(name: str) -> str | None:
    """Return the module named by `wandb` or `wandb:package.module`, with wandb's interface; else None."""
    if name == "wandb":
        return "wandb"
    own = _OWN.fullmatch(name)
    return own[1] if own else None


def logger_packages(name: str) -> tuple[str, ...]:
    """Return the packages that can do a logger's work; empty when it needs none."""
    module = wandb_module(name)
    return (module,) if module is not None else KNOWN_LOGGERS[name]


def require_logger(name: str) -> str:
    """Refuse a name without a logger, else return it.

    Raises:
        InputError: with the nearest name.
    """
    if name not in KNOWN_LOGGERS and wandb_module(name) is None:
        problem = f"{name!r} is neither {', '.join(KNOWN_LOGGERS)} nor of the form wandb:package.module"
        raise InputError(Violation("", problem, nearest(name, KNOWN_LOGGERS) or "csv"))
    return name
