"""When a run asks for another codec: after so many of its own steps, at the end of a cycle."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from weft.describe.plan import Choice
from weft.training import codec_changes
from weft.training.codec_changes import CodecChanges


@pytest.mark.parametrize(
    ("every", "cycle", "begun", "asked"),
    [
        (0, 1, 0, []),
        (4, 1, 0, [4, 8, 12]),
        # A run that goes on from a border has no measured steps there.
        (4, 1, 4, [8, 12]),
        (4, 3, 0, [6, 9, 12]),
        (8, 5, 0, [10]),
    ],
)
def test_a_codec_is_asked_for_at_the_end_of_a_cycle(
    monkeypatch: pytest.MonkeyPatch, every: int, cycle: int, begun: int, asked: list[int]
) -> None:
    monkeypatch.setattr(codec_changes, "together", nullcontext)
    monkeypatch.setattr(codec_changes, "from_first_rank", lambda value: value)
    sync = Choice(name="clan", options={"change_codec_every": every} if every else {})
    run: Any = SimpleNamespace(
        job=SimpleNamespace(plan=SimpleNamespace(sync=sync)),
        program=SimpleNamespace(steps_per_cycle=cycle),
        runtime=SimpleNamespace(rank=0),
    )
    found: list[int] = []
    changes = CodecChanges(run, begun)
    monkeypatch.setattr(changes, "_decided", found.append)
    for done in range(begun + 1, 14):
        assert changes.after(done) is None
    assert found == asked
