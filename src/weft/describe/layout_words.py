"""Layouts in the words of other programs, and the differences of two layouts."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.layout import Layout
from weft.describe.layout_text import counts_text, methods_text, order_text
from weft.describe.plan import AXES, Choice, said_options, shared_out
from weft.describe.units import counted

# What Megatron-LM, torchtitan and the papers write, by name and with or without several stages per device.
_ORDERS = {
    ("1f1b", False): "1F1B order",
    ("graph-1f1b", False): "1F1B order of a stage graph",
    ("depth-first", False): "1F1B order with more in flight",
    ("depth-first", True): "interleaved 1F1B order",
    ("gpipe", False): "GPipe order",
    ("breadth-first", False): "GPipe order",
    ("zb-h1", False): "zero-bubble order ZB-H1",
    ("graph-zb-h1", False): "zero-bubble order ZB-H1 of a stage graph",
    ("zb-v", True): "zero-bubble order ZB-V",
}


def layout_words(layout: Layout, micro_batches: Sequence[int]) -> str:
    """Return a layout in words that users of Megatron-LM and FSDP know.

    `micro_batches` has the micro-batches of each of the layout's replicas in a step.
    """
    said = [_replicas(layout)]
    said += [f"{axis} {degree}" for axis in ("tp", "cp", "ep", "pp") if (degree := getattr(layout, axis)) > 1]
    said += [*_accumulation(layout, micro_batches), *_order(layout, max(micro_batches))]
    if set(layout.recomputes) != {"none"}:
        said.append(f"recomputation {layout.recompute_text}")
    if layout.splits:
        said.append(f"micro-batches split {counts_text(layout.splits)} by stage")
    if layout.loss != "whole":
        said.append("loss in chunks of tokens" if layout.loss == "chunked" else f"{layout.loss} loss")
    if layout.sync != "dense":
        said.append(f"gradients by {methods_text([Choice(name=layout.sync, options=layout.sync_options)])}")
    if layout.methods:
        said.append(methods_text(layout.methods))
    if layout.blocking:
        said.append(f"blocking {' and '.join(layout.blocking)}")
    if layout.layers_per_stage is not None:
        said.append(f"stages of {counts_text(layout.layers_per_stage)} layers")
    if layout.rank_order is not None:
        said.append(f"devices {order_text(layout.rank_order)}")
    return ", ".join(said)


def _replicas(layout: Layout) -> str:
    """Return the replicas and what they share out."""
    if layout.dp == 1:
        return "one replica"
    island = layout.island
    if layout.sharding == "zero-3":
        if island is not None:
            return f"HSDP: FSDP over {island}, {layout.dp // island} times"
        return f"FSDP over {layout.dp} (ZeRO-3)"
    if layout.sharding == "zero-0":
        return f"DDP over {layout.dp}"
    inside = "" if island is None else f" inside islands of {island}"
    return f"data parallel over {layout.dp} with {layout.sharding.replace('zero', 'ZeRO')}{inside}"


def _accumulation(layout: Layout, micro_batches: Sequence[int]) -> list[str]:
    samples = counted(layout.micro_batch_size, "sample")
    if len(set(micro_batches)) > 1:
        return [f"{counts_text(micro_batches)} micro-batches of {samples}"]
    count = micro_batches[0]
    if layout.pp == 1:
        return [f"micro-batches of {samples}", *([f"{count} accumulation steps"] if count > 1 else [])]
    return [f"{count} micro-batch{'es' if count > 1 else ''} of {samples}"]


def _order(layout: Layout, micro_batches: int) -> list[str]:
    """Return the order of micro-batches where there is more than one, and the stages of a device."""
    many = layout.loops > 1
    if layout.pp == 1:
        # A stage without a pipeline is what replicas add up or gather at once.
        ordered = [f"{layout.schedule} order"] if many and micro_batches > 1 else []
        return [*ordered, f"{layout.loops} buckets"] if many else []
    order = _ORDERS.get((layout.schedule, many), f"{layout.schedule} order")
    options = ", ".join(said_options(layout.options))
    return [
        f"{order} ({options})" if options else order,
        *([f"{layout.loops} stages per device"] if many else []),
    ]


def differences(layout: Layout, other: Layout) -> str:
    """Return how a layout differs from another one: in its degrees, its micro-batches and what it keeps.

    It leaves out what only tunes a plan: cuts, shares, buckets, the loss, and orders without a pipeline.
    """
    changed = [axis for axis in AXES if getattr(layout, axis) != getattr(other, axis)]
    said = [" x ".join(f"{axis} {getattr(layout, axis)}" for axis in changed)] if changed else []
    if layout.pp > 1 and layout.schedule != other.schedule:
        said.append(layout.schedule)
    if layout.micro_batch_size != other.micro_batch_size:
        said.append(f"micro-batch size {layout.micro_batch_size}")
    if shared_out(layout) != shared_out(other):
        said.append(shared_out(layout))
    if layout.recompute_text != other.recompute_text:
        said.append(f"recompute {layout.recompute_text}")
    if layout.sync != other.sync:
        said.append(f"sync {layout.sync}")
    if layout.methods != other.methods:
        said.append(methods_text(layout.methods) or "without " + methods_text(other.methods))
    return ", ".join(said)
