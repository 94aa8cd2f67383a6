"""Replicas that shard gradients or weights without a pipeline, as DeepSpeed and FSDP carry them out."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.layout import Layout

# A device runs at most this many passes unit by unit; with more, a unit has several layers.
_MOST_PASSES = 4096
_FEWEST_UNITS = 8


def unit_by_unit(layout: Layout, units: int, global_batch: int) -> Layout:
    """Return the layout in which sharded weights and gradients come and go with every unit of a model.

    The micro-batches follow each other: this is the hybrid order with a round for each of them. So every
    micro-batch gathers and reduces anew, and needs the room of few units (Zhao et al., arXiv 2304.11277,
    section 3). A pipeline, and replicas that keep whole gradients, stay as they are.

    Args:
        units: how many a model has, such as its layers.
        global_batch: samples per step.
    """
    if layout.pp > 1 or layout.sharding not in ("zero-2", "zero-3"):
        return layout
    rounds = max(1, global_batch // (layout.dp * layout.micro_batch_size))
    loops = min(units, max(_FEWEST_UNITS, _MOST_PASSES // rounds))
    return replace(layout, schedule="hybrid", loops=loops, options={"depth": rounds})
