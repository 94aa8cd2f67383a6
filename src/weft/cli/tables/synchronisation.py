"""Synchronisation methods as records and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from weft.cli.output import named_table
from weft.cli.tables.candidates import candidate_record
from weft.describe.synchronisation import sync_words
from weft.planning.sync_comparison import SyncAnswer
from weft.web.rows.synchronisation import (
    CODEC_HEAD,
    CODEC_NOTE,
    STEP_HEAD,
    TRAFFIC_HEAD,
    TRAFFIC_NOTE,
    codec_row,
    step_row,
    traffic_row,
)


def sync_record(answer: SyncAnswer) -> dict[str, Any]:
    """Return a method's answer as plain figures, per step; None where the method refuses every layout."""
    found, figures = answer.found, answer.figures
    return {
        "sync": found.sync.name,
        "options": dict(found.sync.options),
        "contract": found.contract.word,
        "fits": found.fits,
        "reason": found.reason,
        "sent_between_nodes_bytes": figures and figures.traffic.between_bytes,
        "sent_inside_nodes_bytes": figures and figures.traffic.inside_bytes,
        "added_state_bytes": figures and figures.added_bytes,
        "codecs_hidden_s": figures and figures.codecs.hidden_s,
        "codecs_exposed_s": figures and figures.codecs.exposed_s,
        "unfused_codecs_hidden_s": figures and figures.unfused.hidden_s,
        "unfused_codecs_exposed_s": figures and figures.unfused.exposed_s,
        "steps_apart": figures and figures.steps_apart,
        "best": found.candidate and candidate_record(found.candidate),
    }


def sync_tables(answers: Sequence[SyncAnswer]) -> Group:
    """Return tables of steps, traffic and codecs by method in its order, then layouts and reasons."""
    steps, sent, codecs = map(named_table, (STEP_HEAD, TRAFFIC_HEAD, CODEC_HEAD))
    layouts = Table.grid(padding=(0, 2))
    for share in (1, 3):
        layouts.add_column(overflow="fold", ratio=share)
    for answer in answers:
        found, style = answer.found, None if answer.found.fits else "dim"
        if answer.figures is not None:
            steps.add_row(*step_row(answer, answer.figures), style=style)
            sent.add_row(*traffic_row(answer, answer.figures), style=style)
            if answer.figures.codecs.busy_s:
                codecs.add_row(*codec_row(answer, answer.figures), style=style)
        words = Text("refused" if found.candidate is None else found.candidate.words)
        words.append(f"\n{found.reason or (found.candidate and found.candidate.reason)}", style="dim")
        layouts.add_row(sync_words(found.sync), words, style=style)
    parts: list[ConsoleRenderable | str] = [steps, "", sent, Text(TRAFFIC_NOTE, style="dim")]
    if codecs.row_count:
        parts += ["", codecs, Text(CODEC_NOTE, style="dim")]
    return Group(*parts, "", layouts)
