"""The memory of a rank's process: its peaks, and the part that holds no tensor of the training."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.run.accelerator import allocated_bytes


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of this process in bytes.

    Attributes:
        peak: the most so far, of all parts together.
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


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return this rank's peaks by name: of the process's resident memory, and of an accelerator's."""
    on_device = allocated_bytes(device)
    resident = {"max_rss_bytes": resident_memory().peak}
    return resident if on_device is None else {**resident, "max_device_bytes": on_device}


class ProcessMemory:
    """The peaks of this rank, with tensors apart from interpreter and libraries.

    Make it when libraries are loaded and the model is not yet built. `begin_copies` ends the measurement of
    tensors: the copies of checkpoints belong to no predicted step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded_bytes = resident_memory().private
        self._in_steps: Resident | None = None

    def begin_copies(self) -> None:
        """Note the peak of the steps before the first checkpoint; later calls change nothing."""
        if self._in_steps is None:
            self._in_steps = resident_memory()

    def peaks(self) -> dict[str, int]:
        """Return the peaks by name, those of `peak_memory` among them."""
        seen = self._in_steps or resident_memory()
        library_bytes = self._loaded_bytes + seen.mapped
        return {
            **peak_memory(self._device),
            "library_bytes": library_bytes,
            "tensor_bytes": max(0, seen.peak - library_bytes),
        }
