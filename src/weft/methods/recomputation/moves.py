"""Exact moves that trade all or part of a second forward pass for memory, and their refused combinations."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import RECOMPUTES, Recompute
from weft.moves.composition import Composition
from weft.moves.edits import layout_move
from weft.moves.move import Edit, Move, Purpose

# The most counts of first stages to try.
_MOST_FIRST = 16
_CHEN = "Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174"
_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, section 5"


def _known(job: Job) -> list[Recompute]:
    """Return the recompute words that this model allows, the least recomputation first."""
    return [word for word in RECOMPUTES if word != "selective" or job.graph.knows_products]


def _more(job: Job, layout: Layout, word: Recompute) -> Iterator[Edit]:
    """Yield a heavier word in all stages, or in the first ones, which keep most micro-batches in most orders.

    If the words of stages differ, yield only the heaviest of them for all stages.
    """
    if layout.recompute_per_stage is not None:
        if layout.recompute == word:
            yield Edit(f"recompute {word} in all stages", layout.recomputing(word))
        return
    known = _known(job)
    if word not in known or known.index(word) <= known.index(layout.recompute):
        return
    words, stages = f"recompute {layout.recompute} -> {word}", layout.stages
    yield Edit(words, layout.recomputing(word))
    step = -(-stages // _MOST_FIRST)
    for first in range(step, stages, step):
        some = layout.recomputing([word] * first + [layout.recompute] * (stages - first))
        yield Edit(f"{words} in the first {'stage' if first == 1 else f'{first} stages'} of {stages}", some)


def _full(job: Job, layout: Layout) -> Iterator[Edit]:
    return _more(job, layout, "full")


def _selective(job: Job, layout: Layout) -> Iterator[Edit]:
    return _more(job, layout, "selective")


def _less_in_a_stage(job: Job, layout: Layout) -> Iterator[Edit]:
    """Yield each lighter word in one stage, if the words of stages differ."""
    known, words = _known(job), layout.recompute_per_stage or ()
    for stage, word in enumerate(words):
        for lighter in known[: known.index(word)]:
            changed = layout.recomputing([*words[:stage], lighter, *words[stage + 1 :]])
            yield Edit(f"recompute {word} -> {lighter} in stage {stage}", changed)


def _none(_: Job, layout: Layout) -> Iterator[Edit]:
    if layout.recompute != "none":
        yield Edit(f"recompute {layout.recompute} -> none", layout.recomputing("none"))


MOVES: tuple[Move, ...] = (
    layout_move(
        "recompute selectively",
        _selective,
        Purpose.SMALLER,
        otherwise="stages already recompute something, or the model does not say what its products leave",
        summary="Micro-batches keep what products give, and backward passes make the rest again.",
        source=_KORTHIKANTI,
        verify="gradients equal those of kept layers bit by bit; kept bytes equal the closed forms",
        asked_by=("plan.recompute", "selective"),
    ),
    layout_move(
        "recompute activations",
        _full,
        Purpose.SMALLER,
        otherwise="every stage already recomputes its activations",
        summary="Micro-batches keep the inputs of layers only, and backward passes run layers forward again.",
        source=_CHEN,
        verify="kept bytes and backward times of every layer equal the closed forms of the method",
        asked_by=("plan.recompute", "full"),
    ),
    layout_move(
        "recompute less in a stage",
        _less_in_a_stage,
        Purpose.FASTER,
        otherwise="all stages recompute alike",
        summary="One of the stages that recompute unlike each other keeps more of its activations.",
        source=_KORTHIKANTI,
        verify="kept bytes and backward times of every layer equal the closed forms of the method",
    ),
    layout_move(
        "keep activations",
        _none,
        Purpose.LARGER,
        otherwise="no stage recomputes anything",
        summary="No stage runs its layers forward again.",
        source=_CHEN,
        verify="gradients equal those of stages that recompute, bit by bit",
        asked_by=("plan.recompute", "none"),
    ),
)


def _unknown_products(job: Job, layout: Layout) -> str | None:
    if "selective" not in layout.recomputes or job.graph.knows_products:
        return None
    return "the model does not say what its products leave; nearest recompute: full"


COMPOSITIONS = (
    Composition(
        method="recomputation",
        other="models of others",
        reason="selective recomputation needs a model that says what its products leave",
        refuse=_unknown_products,
    ),
)
