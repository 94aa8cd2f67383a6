"""The list of runs keeps its words whole on narrow terminals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cli.tables.printed import text_of

from weft.cli.run_list import HEAD, LEFT_OUT, runs_table
from weft.training.directory.overview import RunOverview, RunState

RUN = RunOverview(
    path=Path("runs", "gpt-demo-1f3a90c2"),
    state=RunState.BROKEN_OFF,
    model="gpt-1m",
    plan="pp 1 x dp 1",
    done=1000,
    steps=100000,
    loss=1.25,
    held_out_loss=1.5,
    held_out_step=1000,
    saved_step=1000,
    step_s=0.25,
    predicted_step_s=0.125,
    tokens_per_s=1e6,
    memory_bytes=1e9,
    newest_s=0.0,
)


def shown(*runs: RunOverview, width: int) -> list[str]:
    return text_of(runs_table(runs, width), width=width).splitlines()


def test_a_wide_terminal_gets_all_columns() -> None:
    head, row = shown(RUN, width=130)
    assert " ".join(head.split()) == " ".join(HEAD)
    assert row.split()[:4] == [RUN.path.name, RUN.model, "broken", "off"]


def test_at_80_columns_the_least_useful_columns_are_left_out_and_words_stay_whole() -> None:
    head, row = shown(RUN, width=80)
    left = [name for name in HEAD if name not in head]
    assert {*left} == {*LEFT_OUT[:2]}
    assert " ".join(row.split()[1:]) == "gpt-1m broken off 1000/100000 1.2500 250 ms 125 ms"


def test_a_name_that_is_longer_than_all_columns_takes_several_lines() -> None:
    long = replace(RUN, path=Path("runs", "a" * 60))
    lines = shown(long, width=60)
    assert all(len(line) <= 60 for line in lines)
    assert "".join(line.split(" ")[0] for line in lines[1:]) == "a" * 60
