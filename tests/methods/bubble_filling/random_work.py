"""Random steps of a device and random work for them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from weft.methods.bubble_filling.work import Busy, DeviceStep, PassName, WorkItem


@dataclass(frozen=True)
class Case:
    step: DeviceStep
    items: tuple[WorkItem, ...]


@st.composite
def cases(draw: st.DrawFn, most_micro_batches: int = 4, most_layers: int = 3) -> Case:
    """One or two stages whose passes come in any order, gaps between them, and layers with two factors each.

    Factors of the same layer have curvature of every micro-batch, perhaps a sum with replicas, and perhaps an
    inversion in some pieces.
    """
    stages = draw(st.integers(1, 2))
    micro_batches = draw(st.integers(1, most_micro_batches))
    waiting = draw(st.permutations([(stage, one) for stage in range(stages) for one in range(micro_batches)]))
    busy: list[Busy] = []
    begun: list[tuple[int, int]] = []
    time = 0.0

    def add(ends: PassName | None, stage: int = -1, micro_batch: int = -1) -> None:
        nonlocal time
        time += draw(st.sampled_from([0, 0, 1, 7, 23, 40]))
        seconds = draw(st.integers(1, 9))
        busy.append(Busy(time, time + seconds, ends, stage, micro_batch))
        time += seconds

    while waiting or begun:
        if waiting and (not begun or draw(st.booleans())):
            begun.append(waiting.pop())
            add("forward", *begun[-1])
        else:
            add("backward", *begun.pop(draw(st.integers(0, len(begun) - 1))))
    if draw(st.booleans()):
        add(None)
    step = DeviceStep(tuple(busy), time + draw(st.sampled_from([0, 3, 30])))
    return Case(step, _layers(draw, stages, micro_batches, most_layers))


def _layers(draw: st.DrawFn, stages: int, micro_batches: int, most: int) -> tuple[WorkItem, ...]:
    items: list[WorkItem] = []
    follows: PassName
    for stage in range(stages):
        for layer in range(draw(st.integers(1, most))):
            for follows in ("forward", "backward"):
                name = f"{follows} factor of {layer}, stage {stage}"
                order = tuple(draw(st.permutations(range(micro_batches))))
                seconds = tuple(
                    float(one)
                    for one in draw(
                        st.lists(st.integers(1, 6), min_size=micro_batches, max_size=micro_batches)
                    )
                )
                items.append(WorkItem(f"curvature, {name}", stage, seconds, order, follows))
                for kind in draw(st.sampled_from([(), ("inversion",), ("sum", "inversion")])):
                    pieces = tuple(map(float, draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))))
                    items.append(WorkItem(f"{kind}, {name}", stage, pieces, after=(len(items) - 1,)))
    return tuple(items)
