"""The loggers that weft knows by name, and the packages that they need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from weft.errors import InputError, Violation, nearest
from weft.installed import remedy


class LoggerNeeds(NamedTuple):
    """The modules of which one does a logger's work, and weft's extra that installs the first."""

    modules: tuple[str, ...] = ()
    extra: str = ""

    @property
    def remedy(self) -> str:
        """The command that installs the first module's package."""
        return remedy(self.extra) if self.extra else f"install {self.modules[0]}"


KNOWN_LOGGERS: Mapping[str, LoggerNeeds] = MappingProxyType(
    {
        "csv": LoggerNeeds(),
        "tensorboard": LoggerNeeds(("tensorboard", "tensorboardX"), "loggers"),
        "wandb": LoggerNeeds(("wandb",), "loggers"),
        "trackio": LoggerNeeds(("trackio",), "loggers"),
        "opentelemetry": LoggerNeeds(("opentelemetry.exporter.otlp.proto.http",), "opentelemetry"),
    }
)
_OWN = re.compile(r"wandb:([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)")


def wandb_module(name: str) -> str | None:
    """Return the module named by `wandb` or `wandb:package.module`, with wandb's interface; else None."""
    if name == "wandb":
        return "wandb"
    own = _OWN.fullmatch(name)
    return own[1] if own else None


def needs_of(name: str) -> LoggerNeeds:
    """Return the needs of a logger; a module of the user's own is in no extra."""
    return KNOWN_LOGGERS.get(name) or LoggerNeeds((name.removeprefix("wandb:"),))


def require_logger(name: str) -> str:
    """Refuse a name without a logger, else return it.

    Raises:
        InputError: with the nearest name.
    """
    if name not in KNOWN_LOGGERS and wandb_module(name) is None:
        problem = f"{name!r} is neither {', '.join(KNOWN_LOGGERS)} nor of the form wandb:package.module"
        raise InputError(Violation("", problem, nearest(name, KNOWN_LOGGERS) or "csv"))
    return name
