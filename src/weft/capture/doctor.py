"""The parts and abilities of this machine, with a remedy for each missing one. No torch here."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from weft.describe.this_machine import this_machine
from weft.describe.units import counted, format_bytes
from weft.files import weft_home
from weft.installed import remedy
from weft.predict.cost.calibration import load_machine
from weft.predict.ledger import Ledger
from weft.timeline.figures import error_text

TORCH_EXTRA = remedy("torch")
PACKAGES = (
    ("torch", True, TORCH_EXTRA),
    ("transformers", True, TORCH_EXTRA),
    ("tokenizers", True, TORCH_EXTRA),
    ("safetensors", True, TORCH_EXTRA),
    ("numba", True, "pip install numba"),
    ("pyarrow", True, "pip install pyarrow"),
)
# Of the intervals for 90 % of steps, the share that must have held; fewer are no accident.
_FEWEST_INSIDE = 0.5


@dataclass(frozen=True, slots=True)
class MachinePart:
    """One part of the machine. `needed` is True if training is impossible without it."""

    part: str
    found: str
    good: bool
    needed: bool = True
    remedy: str = ""

    @property
    def texts(self) -> tuple[str, str, str]:
        """The texts for people: part, found, and the remedy if something is missing."""
        return self.part, self.found, "" if self.good else self.remedy

    def record(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[MachinePart]:
    """Examine Python, packages, devices, measurements, predictions, WEFT_HOME and network namespaces."""
    cluster = this_machine()
    group = cluster.groups[0]
    return [
        MachinePart(
            "python", ".".join(str(part) for part in sys.version_info[:3]), sys.version_info >= (3, 11)
        ),
        *(_package(*entry) for entry in PACKAGES),
        MachinePart(
            "devices",
            f"{cluster.ranks} x {group.device.name}, {format_bytes(group.device.memory_bytes)} each",
            True,
        ),
        _measured(group.device.name),
        _honesty(),
        _writable(),
        MachinePart(
            "network namespaces",
            "ip found" if shutil.which("ip") else "no ip command",
            shutil.which("ip") is not None,
            needed=False,
            remedy="install iproute2",
        ),
    ]


def _package(name: str, needed: bool, remedy: str) -> MachinePart:
    try:
        return MachinePart(name, version(name), True, needed)
    except PackageNotFoundError:
        return MachinePart(name, "not installed", False, needed, remedy)


def _measured(device: str) -> MachinePart:
    if load_machine(device, weft_home()) is not None:
        return MachinePart("measurements", f"of {device}", True, needed=False)
    return MachinePart("measurements", "none", False, needed=False, remedy="weft measure")


def _honesty() -> MachinePart:
    """Return the accuracy of past predictions of this machine's runs."""
    path = weft_home() / "ledger.sqlite"
    if not path.exists():
        return MachinePart("predictions", "none scored", True, needed=False)
    with Ledger(path) as ledger:
        scores = ledger.honesty()
    if "step_s" not in scores:
        return MachinePart("predictions", "none scored", True, needed=False)
    step = scores["step_s"]
    found = (
        f"{counted(step.scored, 'step')} scored, {step.inside:.0%} inside their interval, "
        f"median error {error_text(step.median_error)}"
    )
    right = step.inside >= _FEWEST_INSIDE
    return MachinePart("predictions", found, right, needed=False, remedy="weft measure gpt-1m, or your model")


def _writable() -> MachinePart:
    home = weft_home()
    existing = home
    while not existing.exists():
        existing = existing.parent
    good = os.access(existing, os.W_OK)
    return MachinePart(
        "WEFT_HOME", str(home), good, remedy="" if good else "set WEFT_HOME to a folder you own"
    )
