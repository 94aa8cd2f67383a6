"""The memory of a rank's process under a plan: its peaks, and the part that holds no tensor."""

from __future__ import annotations

import gc
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from weft.run.accelerator import allocated_bytes, forget_allocated


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of this process in bytes.

    Attributes:
        peak: the most since the last `forget_peaks`, of all parts together.
        private: written by the process itself, such as tensors and Python's objects.
        mapped: pages of files, such as the code of libraries.
    """

    peak: int
    private: int
    mapped: int


def resident_memory() -> Resident:
    """Return the resident memory of this process; without Linux, the peak stands for the private part."""
    if sys.platform != "linux":
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = usage if sys.platform == "darwin" else usage * 1024
        return Resident(peak=peak, private=peak, mapped=0)
    # `getrusage` would count the parent's memory before this process replaced its image.
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    size = {line[0]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
    return Resident(size["VmHWM:"], size["RssAnon:"], size["RssFile:"] + size["RssShmem:"])


def forget_peaks(device: torch.device) -> None:
    """Begin the peaks of this process and of its device anew; without Linux, that of the process stays."""
    # Tensors of a former plan may hang in cycles.
    gc.collect()
    forget_allocated(device)
    # The number asks for this, says proc_pid_clear_refs(5). Some containers hide the file.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class ProcessMemory:
    """The peaks of this rank under one plan, with tensors apart from interpreter and libraries.

    Make it when libraries are loaded and the model is not yet built. `begin_copies` ends the measurement of
    tensors: the copies of checkpoints belong to no predicted step.

    Args:
        former: of the plan that this process trained before, whose tensors are gone. The process may keep
            some of their memory, so its libraries were measured before them.
    """

    def __init__(self, device: torch.device, former: Self | None = None) -> None:
        forget_peaks(device)
        self._device = device
        self._loaded_bytes: int = resident_memory().private if former is None else former._loaded_bytes
        self._in_steps: Resident | None = None

    def begin_copies(self) -> None:
        """Note the peak of the steps before the first checkpoint; later calls change nothing."""
        if self._in_steps is None:
            self._in_steps = resident_memory()

    def peaks(self) -> dict[str, int]:
        """Return the peaks by name: of the process, of its parts, and of an accelerator's memory."""
        now, on_device = resident_memory(), allocated_bytes(self._device)
        seen = self._in_steps or now
        # Pages of files that came after the peak are not in it.
        library_bytes = min(self._loaded_bytes + seen.mapped, seen.peak)
        return {
            "max_rss_bytes": now.peak,
            **({} if on_device is None else {"max_device_bytes": on_device}),
            "library_bytes": library_bytes,
            "tensor_bytes": seen.peak - library_bytes,
        }
