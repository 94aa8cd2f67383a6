"""The steps of CSER and of its baseline, on the flat weights of one replica.

`x` are the weights and `p` the update of a local step. `e` is the error, the part of a replica's updates that
no mean has. In all forms of the paper, `x - e` is the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, Protocol

import torch

from weft.methods.cser.runtime.compressors import BlockCompressor, Compressor, Met
from weft.methods.cser.runtime.meeting import MARKS, Assembly


class Form(Protocol):
    """The changes of a replica's weights around a step; `weights`, shape (n,), change in place.

    Attributes:
        restores: True if `after` takes back a step that was not finite.
    """

    restores: bool

    def before(self, weights: torch.Tensor, step: int) -> None:
        """Keep what later calls need of the weights before a step."""
        ...

    def after(self, weights: torch.Tensor, finite: torch.Tensor) -> None:
        """Take the local step in; `finite`, shape (), tells whether all weights of the part are finite."""
        ...

    def update(self, weights: torch.Tensor, step: int, assembly: Assembly) -> Met:
        """Average a part of the update of a step."""
        ...

    def reset(self, weights: torch.Tensor, number: int, assembly: Assembly) -> Met:
        """Average a part of the error at the reset with this number."""
        ...

    def rejoin(self, weights: torch.Tensor, number: int, assembly: Assembly) -> None:
        """Take the common `x - e` of those present, if this replica was absent, before a reset.

        A replica that was absent has the weight 0 in the assembly.
        """
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the state that a checkpoint keeps, by name."""
        ...

    def restart(self) -> None:
        """Begin again from equal weights."""
        ...


class BlockAveraging:
    """Averages of blocks of the weights, at steps and at resets (the authors' released code).

    Resets are those of all forms with blocks. On a block, `x - e` is common, so the mean of `x` has the mean
    error.
    """

    restores = False

    def __init__(self, updates: BlockCompressor | None, resets: BlockCompressor | None) -> None:
        self._updates, self._resets = updates, resets

    def before(self, weights: torch.Tensor, step: int) -> None:
        pass

    def after(self, weights: torch.Tensor, finite: torch.Tensor) -> None:
        pass

    def update(self, weights: torch.Tensor, step: int, assembly: Assembly) -> Met:
        return self._average(self._updates, weights, step, assembly)

    def reset(self, weights: torch.Tensor, number: int, assembly: Assembly) -> Met:
        return self._average(self._resets, weights, number, assembly)

    def _average(
        self, blocks: BlockCompressor | None, weights: torch.Tensor, number: int, assembly: Assembly
    ) -> Met:
        assert blocks is not None, "programs have meetings that options ask for"
        met = blocks.meet(weights, number, assembly)
        weights[met.places] = met.mean
        return met

    def rejoin(self, weights: torch.Tensor, number: int, assembly: Assembly) -> NoReturn:
        raise AssertionError("options refuse absences where no errors are kept")

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def restart(self) -> None:
        pass


class BlockUpdates(BlockAveraging):
    """CSER with common blocks, which needs no error: `x += p - mean p` on the blocks of a step."""

    def before(self, weights: torch.Tensor, step: int) -> None:
        if self._updates is not None:
            self._chosen = self._updates.chosen(step)
            self._former = weights[self._chosen.places.to(weights.device)]

    def update(self, weights: torch.Tensor, step: int, assembly: Assembly) -> Met:
        assert self._updates is not None, "programs have meetings that options ask for"
        moved = self._former - weights[self._chosen.places.to(weights.device)]
        met = self._updates.exchange(moved, self._chosen, assembly)
        met.move(weights, met.own - met.mean)
        return met


class ExplicitErrors:
    """CSER with any compressors C2 of updates and C1 of errors, and an error for every weight.

    A local step takes `p` from `x` and from `e`. A meeting about the kept part `k` with the mean `kbar` then
    changes both: an update `x += k - kbar, e += k`, a reset `x += kbar - k, e -= k`.
    """

    restores = True

    def __init__(self, updates: Compressor | None, resets: Compressor | None, like: torch.Tensor) -> None:
        self._updates, self._resets = updates, resets
        # Before a step its weights; after it their update.
        self._moved = torch.zeros_like(like)
        self.error = torch.zeros_like(like)

    def before(self, weights: torch.Tensor, step: int) -> None:
        self._moved.copy_(weights)

    def after(self, weights: torch.Tensor, finite: torch.Tensor) -> None:
        weights.copy_(torch.where(finite, weights, self._moved))
        self._moved.sub_(weights)
        self.error.sub_(self._moved)

    def update(self, weights: torch.Tensor, step: int, assembly: Assembly) -> Met:
        assert self._updates is not None, "programs have meetings that options ask for"
        met = self._updates.meet(self._moved, step, assembly)
        met.move(weights, met.own - met.mean)
        met.move(self.error, met.own)
        return met

    def reset(self, weights: torch.Tensor, number: int, assembly: Assembly) -> Met:
        assert self._resets is not None, "programs have meetings that options ask for"
        met = self._resets.meet(self.error, number, assembly)
        met.move(weights, met.mean - met.own)
        met.move(self.error, -met.own)
        return met

    def rejoin(self, weights: torch.Tensor, number: int, assembly: Assembly) -> None:
        common = assembly.mean(weights - self.error, number % MARKS)
        weights.copy_(torch.where(assembly.finite, weights, common + self.error))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"errors": self.error}

    def restart(self) -> None:
        self.error.zero_()


class ErrorFeedback:
    """EF-SGD: weights are the same on all replicas, and unsent parts of updates wait in `e`.

    `e += p`, then `x -= mean k` and `e -= k` for the kept part `k` of `e`.
    """

    restores = True

    def __init__(self, updates: Compressor, like: torch.Tensor) -> None:
        self._updates, self._former = updates, torch.zeros_like(like)
        self.error = torch.zeros_like(like)

    def before(self, weights: torch.Tensor, step: int) -> None:
        self._former.copy_(weights)

    def after(self, weights: torch.Tensor, finite: torch.Tensor) -> None:
        self.error.add_(torch.where(finite, self._former - weights, 0.0))
        weights.copy_(self._former)

    def update(self, weights: torch.Tensor, step: int, assembly: Assembly) -> Met:
        met = self._updates.meet(self.error, step, assembly)
        met.move(self.error, -met.own)
        met.move(weights, -met.mean)
        return met

    def reset(self, weights: torch.Tensor, number: int, assembly: Assembly) -> NoReturn:
        raise AssertionError("error feedback has no resets")

    def rejoin(self, weights: torch.Tensor, number: int, assembly: Assembly) -> NoReturn:
        raise AssertionError("error feedback has no resets")

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"errors": self.error}

    def restart(self) -> None:
        self.error.zero_()
