"""`Keeping`: how much of their forward passes stages keep for the backward ones; methods contribute it.

A stage says a word of `describe.plan.RECOMPUTES`. What keeps everything is here, what keeps less is a method.
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
    """What one micro-batch may leave in layers from its forward to its backward pass."""

    @property
    def kept(self) -> _Given:
        """Bytes of all that backward passes need."""

    @property
    def inputs(self) -> _Given:
        """Bytes of the layers' inputs."""

    @property
    def products(self) -> _Given:
        """Bytes of what is kept beside inputs, not to call products again."""


class Timed(Protocol[_Given]):
    """What one micro-batch takes in layers."""

    @property
    def forward_s(self) -> _Given:
        """Seconds of the forward pass."""

    @property
    def without_products_s(self) -> _Given:
        """Seconds of the forward pass without its products."""


class Keeping(ABC):
    """What stages with one word leave until their backward passes, which make the rest again."""

    word: ClassVar[Recompute]

    @abstractmethod
    def left(self, layers: Kept[Number]) -> Number:
        """Return bytes that a micro-batch leaves."""

    @abstractmethod
    def made(self, layers: Kept[Number]) -> Number:
        """Return bytes that backward passes make again; less than 0 where nothing is to be made."""

    @abstractmethod
    def again_s(self, layers: Timed[Number]) -> Number:
        """Return seconds of what backward passes run again."""


class KeepAll(Keeping):
    """Everything stays."""

    word = "none"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.kept

    def made(self, layers: Kept[Number]) -> Number:
        return 0.0 * layers.kept

    def again_s(self, layers: Timed[Number]) -> Number:
        return 0.0 * layers.forward_s


@cache
def keeping_of(word: Recompute) -> Keeping:
    """What a word of the plan's stages keeps."""
    known: tuple[Keeping, ...] = (KeepAll(), *parts(Keeping))
    return next(one for one in known if one.word == word)
