"""Reasons why a layout's division of the batch, the layers or the devices is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from weft.describe.layout_text import order_text
from weft.describe.plan import Recompute


def refuse_layers(layers_per_stage: Sequence[int], stages: int, layers: int) -> str | None:
    """Return the reason why a chain of `layers` cannot be cut into `stages` with these counts, or None."""
    if len(layers_per_stage) != stages:
        return f"layers for {len(layers_per_stage)} stages are given, pp x loops = {stages} stages"
    if min(layers_per_stage) < 1:
        return (
            f"stage {layers_per_stage.index(min(layers_per_stage))} is given no layer; at least 1 is needed"
        )
    if sum(layers_per_stage) != layers:
        return f"the stages are given {sum(layers_per_stage)} layers, the model has {layers}"
    return None


def refuse_recomputes(recomputes: Sequence[Recompute], stages: int) -> str | None:
    """Return the reason why one `recompute` word per stage does not fit the number of stages, or None."""
    if len(recomputes) == stages:
        return None
    return f"recompute of {len(recomputes)} stages is given, pp x loops = {stages} stages"


def refuse_splits(splits: Sequence[int], stages: int, micro_batch_size: int) -> str | None:
    """Return the reason why stages cannot split micro-batches into these numbers of parts, or None."""
    if len(splits) != stages:
        return f"splits of {len(splits)} stages are given, pp x loops = {stages} stages"
    odd = next((count for count in splits if micro_batch_size % count), None)
    if odd is None:
        return None
    near = gcd(odd, micro_batch_size)
    return f"micro-batches of {micro_batch_size} samples cannot be split in {odd}; nearest splits: {near}"


def refuse_order(rank_order: Sequence[int], ranks: int, width: int) -> str | None:
    """Return the reason why a rank order is illegal for replicas of `width` ranks, or None."""
    if len(rank_order) != ranks:
        return f"the rank order has {len(rank_order)} devices, the layout has {ranks} ranks"
    missing = sorted(set(range(ranks)) - set(rank_order))
    if missing:
        return f"the rank order leaves device {missing[0]} out; each of 0 to {ranks - 1} must be named once"
    for first in range(0, ranks, width):
        together = list(rank_order[first : first + width])
        if together != sorted(together):
            near = order_text(sorted(together))
            return f"ranks of one replica of a stage sit on devices {order_text(together)}; nearest: {near}"
    return None


def refuse_batch(global_batch: int, dp: int, micro_batch_size: int) -> str | None:
    """Return the reason why replicas cannot have equal shares of the batch, or None."""
    samples = dp * micro_batch_size
    if global_batch % samples == 0:
        return None
    near = max(samples, samples * round(global_batch / samples))
    return (
        f"global batch {global_batch} is not a multiple of dp {dp} x micro-batch size "
        f"{micro_batch_size} = {samples}; nearest global batch: {near}"
    )


def refuse_shares(
    micro_batches: Sequence[int], global_batch: int, dp: int, micro_batch_size: int
) -> str | None:
    """Return the reason why replicas cannot run these numbers of micro-batches, or None."""
    if len(micro_batches) != dp:
        return f"shares for {len(micro_batches)} replicas are given, dp is {dp}"
    if min(micro_batches) < 1:
        return (
            f"replica {micro_batches.index(min(micro_batches))} is given no micro-batch; at least 1 is needed"
        )
    samples = sum(micro_batches) * micro_batch_size
    if samples != global_batch:
        return (
            f"{sum(micro_batches)} micro-batches of {micro_batch_size} are {samples} samples, the global "
            f"batch is {global_batch}; nearest global batch: {samples}"
        )
    return None
