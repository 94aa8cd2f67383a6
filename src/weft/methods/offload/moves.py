"""The exact moves that offload the optimizer states, or the activations, of stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice
from weft.methods.offload.options import ACTIVATIONS, NAME, STATES, offloaded, options_with
from weft.moves.edits import layout_move
from weft.moves.move import Edit, Move, Purpose

# The most counts of first stages to try.
_MOST_FIRST = 8


def _more(job: Job, layout: Layout, word: str) -> Iterator[Edit]:
    """Yield the offload of all stages, or of the first ones, which keep most micro-batches in most orders."""
    known = offloaded(layout.methods_beside(job.methods), layout.stages).stages
    if len(known[word]) == layout.stages:
        return
    step = -(-layout.stages // _MOST_FIRST)
    for first in (layout.stages, *range(step, layout.stages, step)):
        stages = tuple(sorted({*known[word], *range(first)}))
        chosen = {**known, word: stages}
        whole = {key: len(of) == layout.stages or of for key, of in chosen.items()}
        choice = Choice(name=NAME, options=options_with(whole))
        others = tuple(one for one in layout.methods if one.name != NAME)
        of_stages = "" if first == layout.stages else f" of the first {first} of {layout.stages} stages"
        if stages != known[word]:
            yield Edit(f"offload {_WORDS[word]}{of_stages}", replace(layout, methods=(*others, choice)))


_WORDS = {STATES: "optimizer states", ACTIVATIONS: "activations"}

MOVES: tuple[Move, ...] = (
    layout_move(
        "offload optimizer states",
        partial(_more, word=STATES),
        Purpose.SMALLER,
        otherwise="all stages have their states in host memory, or the optimizer keeps none",
        summary="Optimizer states are in host memory, and on the device only for the step of their stage.",
        source="Ren et al., ZeRO-Offload, arXiv 2101.06840, without computation on the host",
        verify="weights equal those of states that stay, bit by bit; resident bytes equal closed forms",
    ),
    layout_move(
        "offload activations",
        partial(_more, word=ACTIVATIONS),
        Purpose.SMALLER,
        otherwise="all stages have their activations in host memory",
        summary="Activations are in host memory from a forward pass until just before its backward pass.",
        source="Rhu et al., vDNN, arXiv 1602.08124",
        verify="weights equal those of activations that stay, bit by bit; resident bytes equal closed forms",
    ),
)
