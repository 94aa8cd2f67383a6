"""Stages whose layers form a graph: which values they take and give, and which layer reads which.

A stage without this is a chain: one input, one output, each layer from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol, runtime_checkable

# Stands in `takes` for what a micro-batch brings.
SAMPLES = -1


class Wiring(NamedTuple):
    """How the layers of a stage read each other.

    Values are numbered: the stage's inputs first, then what each layer gives. `reads` has those that each
    layer reads, `gives` those that leave the stage.
    """

    reads: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]


@runtime_checkable
class Wired(Protocol):
    """A stage with several inputs or outputs.

    Attributes:
        takes: positions of the layers of other stages that its own read, rising, each an input; `SAMPLES`
            before them where one reads samples.
        gives: positions of its own layers that leave the stage, rising; each is an output.
        wiring: of its own layers.
    """

    takes: Sequence[int]
    gives: Sequence[int]
    wiring: Wiring

    def readers(self, layer: int) -> Set[int]:
        """Return positions of the layers that read what a layer gives."""
        ...

    def value_shape(self, layer: int, samples: int) -> tuple[int, ...]:
        """Shape of what a layer gives of so many samples."""
        ...
