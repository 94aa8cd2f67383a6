"""Rows of mesh x order x sharding x recomputation x clipping x heads, each choice with each other.

`cases` are all of them that can be; the table has a few in which every two choices that go together meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

from equality_table import Row
from methods.rows.auxiliary_head import Head
from methods.rows.gradient_norm import Clips
from small_plans import divisible

from weft.describe.plan import RECOMPUTES, Sharding
from weft.predict.cost.memory import SHARDINGS
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, paths_of

# Eight layers and four groups of heads, so that up to eight ranks divide them either way.
MODEL = replace(divisible("llama", heads=4), layers=6)
CLIPS = Clips(0.3)
# Behind this block of six, in a first, middle or last stage.
HEAD = Head(3)
MICRO_BATCHES = 4
# (schedule, loops); those of the second line are for several devices in line.
ONE_DEVICE = (("gpipe", 1), ("breadth-first", 2))
ORDERS = (
    *ONE_DEVICE,
    *(("1f1b", 1), ("depth-first", 2), ("hybrid", 2), ("zb-h1", 1), ("zb-v", 2), ("chimera", 1)),
)
Choices = tuple[tuple[str, object], ...]
CHOICES = ("pp", "dp", "tp", "order", "sharding", "recompute", "clips", "headed")


def cases(most_ranks: int) -> Iterator[Row]:
    """Every row on at most so many ranks; every other one clips, some of those without tensor ranks have a
    head."""
    number = 0
    for pp in (1, 2, 4, 8):
        for dp in (1, 2, 3, 4, 8):
            for tp in (1, 2, 4):
                if pp * dp * tp > most_ranks:
                    continue
                for (schedule, loops), sharding in _orders(pp, dp):
                    for recompute in RECOMPUTES:
                        headed = tp == 1 and number % 5 < 2
                        yield Row(
                            MODEL,
                            schedule,
                            pp,
                            dp,
                            tp,
                            loops=loops,
                            micro_batches=MICRO_BATCHES,
                            sharding=sharding,
                            recompute=recompute,
                            methods=(CLIPS,) * (number % 2) + (HEAD,) * headed,
                        )
                        number += 1


def _orders(pp: int, dp: int) -> Iterator[tuple[tuple[str, int], Sharding]]:
    for name, loops in ONE_DEVICE if pp == 1 else ORDERS:
        schedule = get_schedule(name)
        stages = pp * loops
        if stages > MODEL.layers + 2 or schedule.refuse(Pipeline(pp, stages, MICRO_BATCHES), {}):
            continue
        replicas = dp * paths_of(schedule)
        for sharding in SHARDINGS if replicas > 1 else SHARDINGS[:1]:
            yield (name, loops), sharding


def choices_of(row: Row) -> Choices:
    order, methods = (row.schedule, row.loops), row.methods
    found = (row.pp, row.dp, row.tp, order, row.sharding, row.recompute, CLIPS in methods, HEAD in methods)
    return tuple(zip(CHOICES, found, strict=True))


@cache
def pairs(row: Row) -> frozenset[Choices]:
    """Every two choices of a row that must meet once."""
    return frozenset(
        pair
        for pair in combinations(choices_of(row), 2)
        # Every order under every sharding, and to the bit: tests/methods/rows/sharding.py.
        if {name for name, _ in pair} != {"order", "sharding"}
    )
