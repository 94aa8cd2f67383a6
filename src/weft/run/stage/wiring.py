"""Stages with layers that form a graph: their inputs and outputs, and the layers that read each other.

A stage without this is a chain: one input, one output, each layer reads the one before.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol, runtime_checkable


class Wiring(NamedTuple):
    """The edges between the layers of a stage.

    Values are numbered: the inputs of samples and the values of other stages first, then each layer's output.
    `reads` has the values that each layer reads, `gives` the values that leave the stage.
    """

    reads: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]


@runtime_checkable
class Wired(Protocol):
    """A stage with several inputs or outputs.

    Attributes:
        inputs: numbers of the inputs of a sample that its layers read, rising.
        takes: positions of the layers of other stages that its own read, rising; each is a value behind those
            inputs.
        gives: positions of its own layers with outputs that leave the stage, rising; each is an output.
        wiring: the wiring of its own layers.
    """

    inputs: Sequence[int]
    takes: Sequence[int]
    gives: Sequence[int]
    wiring: Wiring

    def readers(self, layer: int) -> Set[int]:
        """Return the positions of the layers that read a layer's output."""
        ...

    def value_shape(self, layer: int, samples: int) -> tuple[int, ...]:
        """Return the shape of a layer's output for that number of samples."""
        ...
