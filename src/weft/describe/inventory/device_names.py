"""Names of devices outside of the catalogue: of drivers, schedulers and labels.

One device has many names: `NVIDIA A100-SXM4-80GB` of the driver, `nvidia_a100-sxm4-80gb` and `a100` of Slurm,
`NVIDIA-A100-SXM4-80GB` and `nvidia-a100-80gb` of Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from weft.describe.catalogue import CatalogueEntry, catalogue

_MAKERS = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct", "gpu"})
# Shorter words are parts of many names by chance.
_SHORTEST = 4
# A driver reports a little less than the module holds: error correction takes a part.
_NEAR = 0.12
# A partition of a device, such as 1g.10gb of a100_1g.10gb.
_SLICE = re.compile(r"\d+g\.\d+gb")


def devices_named(word: str, memory_bytes: int | None = None, hints: Sequence[str] = ()) -> list[str]:
    """Return the catalogue's devices that a word may mean, most likely first; empty when it means none.

    Args:
        memory_bytes: of the device; it tells variants of one name apart.
        hints: words that narrow the devices down, where they name some of them.
    """
    found = _named(word)
    if memory_bytes is not None:
        near = [name for name in found if _is_near(catalogue()[name], memory_bytes)]
        found = near or found
    for hint in hints:
        named = _named(hint)
        if not word and named:
            found = found or named
        found = [name for name in found if name in named] or found
    return found


def is_slice(word: str) -> bool:
    """Return True for the name of a partition of a device (MIG), with or without its memory."""
    return "mig" in _parts(word) or _SLICE.search(word.lower()) is not None


def _named(word: str) -> list[str]:
    parts = _parts(word)
    if not parts:
        return []
    names = {name: [_parts(text) for text in _texts(entry)] for name, entry in catalogue().items()}
    for fits in (
        lambda known: known == parts,
        lambda known: "".join(known) == "".join(parts),
        lambda known: set(parts) <= set(known),
        lambda known: len("".join(parts)) >= _SHORTEST and "".join(parts) in "".join(known),
    ):
        if found := [name for name, known in names.items() if any(map(fits, known))]:
            return found
    return []


def _texts(entry: CatalogueEntry) -> tuple[str, ...]:
    return (entry.device.name, *entry.aliases, *entry.driver_names)


def _parts(word: str) -> list[str]:
    """Return the words of a name in small letters, without its maker and its family."""
    return [part for part in re.split(r"[^a-z0-9.]+", word.lower()) if part and part not in _MAKERS]


def _is_near(entry: CatalogueEntry, memory_bytes: int) -> bool:
    return abs(entry.device.memory_bytes - memory_bytes) <= _NEAR * entry.device.memory_bytes
