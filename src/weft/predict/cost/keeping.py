"""`Keeping`: the part of their forward passes that stages keep for backward; methods contribute it.

A stage names a word of `describe.plan.RECOMPUTES`. The word that keeps all is here; others are methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar, Protocol, TypeVar

from weft.bundles import parts
from weft.describe.plan import Recompute
from weft.program.arrays import Floats

# One number for a stage, or an array with one for each layer.
Number = TypeVar("Number", float, Floats)
_Given = TypeVar("_Given", bound="float | Floats", covariant=True)


class Kept(Protocol[_Given]):
    """Bytes that one micro-batch may leave in layers from its forward to its backward pass."""

    @property
    def kept(self) -> _Given:
        """Bytes of all inputs of backward passes."""

    @property
    def inputs(self) -> _Given:
        """Bytes of the layers' inputs."""

    @property
    def products(self) -> _Given:
        """Bytes of kept products, without inputs; backward passes do not repeat these products."""

    @property
    def freed_products(self) -> _Given:
        """The part of `products` that is not in `kept`."""

    @property
    def temporaries(self) -> _Given:
        """Bytes that the backward pass of a layer takes, besides the kept ones."""

    @property
    def later_temporaries(self) -> _Given:
        """Bytes of temporaries after a layer that recomputes everything has run again."""


class Timed(Protocol[_Given]):
    """Seconds that one micro-batch takes in layers."""

    @property
    def forward_s(self) -> _Given:
        """Seconds of the forward pass."""

    @property
    def without_products_s(self) -> _Given:
        """Seconds of the forward pass without its products."""


class Keeping(ABC):
    """A recompute word of stages: the bytes kept until their backward passes, and the recomputed rest."""

    word: ClassVar[Recompute]

    @abstractmethod
    def left(self, layers: Kept[Number]) -> Number:
        """Return bytes that a micro-batch leaves."""

    @abstractmethod
    def made(self, layers: Kept[Number]) -> Number:
        """Return bytes that backward passes recompute; less than 0 where there is nothing to recompute."""

    def taken(self, layers: Kept[Number]) -> Number:
        """Return the bytes that a layer's backward pass takes beside those that were left."""
        return self.made(layers) + layers.temporaries

    @abstractmethod
    def again_s(self, layers: Timed[Number]) -> Number:
        """Return seconds of the recomputation in backward passes."""


class KeepAll(Keeping):
    """The word "none": all activations stay."""

    word = "none"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.kept

    def made(self, layers: Kept[Number]) -> Number:
        return 0.0 * layers.kept

    def again_s(self, layers: Timed[Number]) -> Number:
        return 0.0 * layers.forward_s


@cache
def keeping_of(word: Recompute) -> Keeping:
    """Return the `Keeping` for a recompute word of the plan's stages."""
    known: tuple[Keeping, ...] = (KeepAll(), *parts(Keeping))
    return next(one for one in known if one.word == word)
