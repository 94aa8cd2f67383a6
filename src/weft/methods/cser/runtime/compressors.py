"""The parts of a flat vector that replicas send each other: common blocks, largest numbers, or signs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from weft.methods.cser.blocks import Blocks
from weft.methods.cser.runtime.meeting import MARKS, Assembly, numbers_in
from weft.methods.cser.traffic import SCALED, kept_of
from weft.sync.codecs.counter import Key, uniforms


class Met(NamedTuple):
    """The part of a vector that one meeting was about.

    Attributes:
        places: its places in the vector; None: all.
        own, mean: this replica's kept part, and the mean of those of all.
        blocks: its blocks, on the host; None where there are none.
    """

    places: torch.Tensor | None
    own: torch.Tensor
    mean: torch.Tensor
    blocks: torch.Tensor | None = None

    def move(self, vector: torch.Tensor, values: torch.Tensor) -> None:
        """Add values to the part of a vector, shape (n,)."""
        if self.places is None:
            vector.add_(values)
        else:
            vector.index_add_(0, self.places, values)

    @property
    def squares(self) -> torch.Tensor:
        """The squared distance of the own part from the mean, shape ()."""
        return (self.own - self.mean).double().square().sum()


class Compressor(Protocol):
    """A choice of the part of a vector that a meeting is about."""

    def meet(self, vector: torch.Tensor, number: int, assembly: Assembly) -> Met:
        """Exchange the kept part of a vector, shape (n,), in the meeting with this number; keep `vector`."""
        ...


class ChosenBlocks(NamedTuple):
    """The blocks of one meeting: their sorted numbers, the places of their weights, and their mark."""

    numbers: torch.Tensor
    places: torch.Tensor
    mark: int


class BlockCompressor:
    """A few blocks, the same on all replicas (GRBS, arXiv 2007.13221).

    A draw depends on seed, purpose, part and meeting only. No other draw of a process moves it. `shuffled`
    takes the blocks of one drawn order in turn, so that none waits longer than the ratio, rounded up.

    Args:
        blocks: all of them.
        ratio: all blocks over kept blocks.
        shuffled: whether blocks come in turn.
        key: seed, purpose and name of the part.
    """

    def __init__(self, blocks: Blocks, ratio: float, shuffled: bool, *key: int | str) -> None:
        self.blocks, self.kept, self._shuffled = blocks, blocks.kept(ratio), shuffled
        self._seed, self._key = int(key[0]), key[1:]
        drawn = self._drawn("order")
        self._order, self._marks = drawn.argsort(stable=True), (drawn * MARKS).long()

    def _drawn(self, *what: int | str) -> torch.Tensor:
        return uniforms(Key.of(self._seed, "cser", *self._key, *what), 0, self.blocks.count, "cpu")

    def chosen(self, number: int) -> ChosenBlocks:
        """Return the blocks of a meeting, on the host."""
        count, length = self.blocks.count, self.blocks.length
        if self._shuffled:
            turn = torch.arange(number * self.kept, (number + 1) * self.kept) % count
            found = self._order[turn]
        else:
            found = self._drawn(number).argsort(stable=True)[: self.kept]
        found = found.sort().values
        places = (found[:, None] * length + torch.arange(length)).view(-1)
        mark = int(self._marks[found].sum()) % MARKS
        return ChosenBlocks(found, places[places < self.blocks.numbers], mark)

    def meet(self, vector: torch.Tensor, number: int, assembly: Assembly) -> Met:
        chosen = self.chosen(number)
        return self.exchange(vector[chosen.places.to(vector.device)], chosen, assembly)

    def exchange(self, own: torch.Tensor, chosen: ChosenBlocks, assembly: Assembly) -> Met:
        """Meet about the numbers `own` of chosen blocks."""
        # Messages of ranks that chose other blocks have the same length.
        message = own.new_zeros(min(self.kept * self.blocks.length, self.blocks.numbers))
        message[: len(own)] = own
        mean = assembly.mean(message, chosen.mark)[: len(own)]
        return Met(chosen.places.to(own.device), own, mean, chosen.numbers)


class TopKCompressor:
    """The numbers of the largest magnitude of each replica, and their places."""

    def __init__(self, numbers: int, ratio: float) -> None:
        self.kept = kept_of(numbers, ratio)

    def meet(self, vector: torch.Tensor, number: int, assembly: Assembly) -> Met:
        places = vector.abs().topk(self.kept).indices.sort().values
        payload = torch.cat([vector[places].view(torch.uint8), places.int().view(torch.uint8)])
        everyone, weights = assembly.messages(payload, vector.dtype)
        own, mean = torch.zeros_like(vector), torch.zeros_like(vector)
        own[places] = vector[places]
        begins = self.kept * vector.itemsize
        for message, weight in zip(everyone, weights, strict=True):
            values = numbers_in(message[:begins], vector.dtype)
            at = numbers_in(message[begins:], torch.int32).long()
            mean.index_add_(0, at, torch.where(weight > 0, values * weight, 0.0))
        return Met(None, own, mean)


class SignCompressor:
    """The signs of all numbers, times the mean magnitude of each `SCALED` of them."""

    def meet(self, vector: torch.Tensor, number: int, assembly: Assembly) -> Met:
        length = len(vector)
        groups = torch.nn.functional.pad(vector, (0, -length % SCALED)).view(-1, SCALED)
        counts = torch.full_like(groups[:, 0], SCALED)
        counts[-1] = length - SCALED * (len(groups) - 1)
        scales = (groups.abs().sum(1) / counts).float()
        bits = _packed(torch.nn.functional.pad(vector < 0, (0, -length % 8)))
        everyone, weights = assembly.messages(torch.cat([scales.view(torch.uint8), bits]), vector.dtype)
        begins = scales.nbytes
        mean = torch.zeros_like(vector)
        for message, weight in zip(everyone, weights, strict=True):
            scale = numbers_in(message[:begins], torch.float32)
            signs = _signed(scale, message[begins:], vector)
            mean += torch.where(weight > 0, signs * weight, 0.0)
        return Met(None, _signed(scales, bits, vector), mean)


def _signed(scales: torch.Tensor, bits: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    negative = ((bits[:, None] >> _shifts(bits)) & 1).view(-1)[: len(like)].bool()
    magnitude = scales.to(like.dtype).repeat_interleave(SCALED)[: len(like)]
    return torch.where(negative, -magnitude, magnitude)


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Return truth values, shape (8 n,), as bytes, shape (n,)."""
    return (bits.view(-1, 8).to(torch.uint8) << _shifts(bits)).sum(1, dtype=torch.uint8)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
