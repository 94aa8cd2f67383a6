"""The order of a window's pieces, counted from the step whose passes they use.

Windows repeat. A piece that stands before its pass, in the first step, uses that pass of the window before.
So a piece has a place in the window, and a turn. The turn is the place, plus the number of all pieces for
each window between.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.methods.bubble_filling.gaps import in_order, passes_of
from weft.methods.bubble_filling.work import DeviceStep, Placed, WorkItem


def turns_of(step: DeviceStep, items: Sequence[WorkItem], placed: Sequence[Placed]) -> list[list[int]]:
    """Return the turn of each piece of each item; every piece must be placed once.

    A piece that follows no pass takes the first turn behind the piece before it and behind `after`.
    """
    passes = passes_of(step)
    place_of = {(one.item, one.piece): place for place, one in enumerate(placed)}
    turns: list[list[int]] = [[] for _ in items]
    for item in in_order(items):
        work = items[item]
        behind = max((max(turns[before]) for before in work.after), default=-1)
        for piece in range(len(work.pieces_s)):
            place = place_of[item, piece]
            if work.follows is None:
                later = max(0, -(-(behind + 1 - place) // len(placed)))
            else:
                one = placed[place]
                needed = passes[work.follows, work.stage, work.micro_batches[piece]]
                later = int(one.step == 0 and one.behind < needed)
            turns[item].append(place + later * len(placed))
            if not work.micro_batches:
                behind = turns[item][-1]
    return turns


def mixed(items: Sequence[WorkItem], turns: Sequence[Sequence[int]]) -> list[int]:
    """Return the items that begin again, in the next window, before they and those behind them have ended.

    One sum or result would then hold work of two windows.
    """
    period = sum(map(len, turns))
    last = [max(of) for of in turns]
    for item, work in enumerate(items):
        for before in work.after:
            last[before] = max(last[before], max(turns[item]))
    return [item for item, of in enumerate(turns) if last[item] >= min(of) + period]
