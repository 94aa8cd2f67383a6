"""`SyncedPart`: flat weights that a replica steps by itself and of which it averages parts with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from weft.methods.cser.blocks import Blocks
from weft.methods.cser.options import CserOptions
from weft.methods.cser.runtime.compressors import (
    BlockCompressor,
    Compressor,
    Met,
    SignCompressor,
    TopKCompressor,
)
from weft.methods.cser.runtime.forms import BlockAveraging, BlockUpdates, ErrorFeedback, ExplicitErrors, Form
from weft.run.state.precision import give


class SyncedPart:
    """Tensors of one stage that share blocks, and the form in which they are synchronised.

    Args:
        name: that of the first tensor's parameter. It keys the draws, so copies of one weight draw alike.
        weights: the stepped tensors; they become views of one flat tensor.
        options, seed: those of the method and of the job.

    Attributes:
        met_at: for each block the steps done when a mean last took up its errors; -1 before the first step.
    """

    def __init__(self, name: str, weights: Sequence[torch.Tensor], options: CserOptions, seed: int) -> None:
        self.name, self.flat, ratios = name, joined(weights), options.ratios
        blocks = Blocks.of(len(self.flat), ratios.largest, options.block)

        def compressor(ratio: float, purpose: str) -> Compressor:
            if options.compressor == "top-k":
                return TopKCompressor(len(self.flat), ratio)
            if options.compressor == "sign":
                return SignCompressor()
            return BlockCompressor(blocks, ratio, options.order == "shuffled", seed, purpose, name)

        updates = None if ratios.update is None else compressor(ratios.update, "update")
        resets = None if ratios.reset is None else compressor(ratios.reset, "reset")
        self.form = _form(options, updates, resets, self.flat)
        self._updates_count = options.variant != "paper"
        counted = blocks.count if options.compressor == "blocks" else 0
        self.met_at = torch.full((counted,), -1, dtype=torch.int64)

    def begin_step(self, step: int) -> None:
        """Keep what the meetings after a step need; replicas are equal before the first one."""
        self.met_at[self.met_at < 0] = step
        self.form.before(self.flat, step)

    def note(self, met: Met, step: int, *, reset: bool) -> None:
        """Note the blocks that met after a step."""
        if met.blocks is not None and (reset or self._updates_count):
            self.met_at[met.blocks] = step + 1

    def stalest(self, step: int) -> int:
        """Return the steps since the block that waits longest has met, after a step."""
        return step + 1 - int(self.met_at.min()) if len(self.met_at) else 0

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the state that a checkpoint keeps on this rank, by name."""
        found = {**self.form.tensors(), "met_at": self.met_at}
        return {f"{what}/{self.name}": value for what, value in found.items()}

    def restart(self) -> None:
        """Begin again from equal weights."""
        self.met_at.fill_(-1)
        self.form.restart()


def _form(
    options: CserOptions, updates: Compressor | None, resets: Compressor | None, flat: torch.Tensor
) -> Form:
    if options.variant == "error-feedback":
        assert updates is not None, "options refuse error feedback without a ratio"
        return ErrorFeedback(updates, flat)
    if options.explicit:
        return ExplicitErrors(updates, resets, flat)
    assert updates is None or isinstance(updates, BlockCompressor)
    assert resets is None or isinstance(resets, BlockCompressor)
    return (BlockUpdates if options.variant == "paper" else BlockAveraging)(updates, resets)


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat tensor, shape (n,), whose views the weights are, in their order.

    Masters lie so already. Parameters of other storage move to a new one.
    """
    sizes = [one.numel() for one in weights]
    starts = [weights[0].storage_offset() + start for start in accumulate(sizes, initial=0)]
    storage = weights[0].untyped_storage().data_ptr()
    in_place = all(
        one.is_contiguous() and one.storage_offset() == start and one.untyped_storage().data_ptr() == storage
        for one, start in zip(weights, starts, strict=False)
    )
    if in_place:
        return weights[0].detach().as_strided((sum(sizes),), (1,))
    flat = torch.cat([one.detach().reshape(-1) for one in weights])
    for one, (start, end) in zip(weights, pairwise(accumulate(sizes, initial=0)), strict=True):
        assert isinstance(one, nn.Parameter), "masters have one storage"
        give(one, flat[start:end].view(one.shape))
    return flat
