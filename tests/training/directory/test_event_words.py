"""Events in words: news are told plainly, bad ones as bad, and lines by another hand not at all."""

from __future__ import annotations

import pytest

from weft.training.directory.event_words import event_words


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "started", "step": 0}, ("started", False)),
        ({"event": "checkpoint", "step": 40, "bytes": 7}, ("checkpoint after 40 steps", False)),
        ({"event": "stopped", "step": 3, "signal": "SIGINT"}, ("stopped after 3 steps by SIGINT", False)),
        ({"event": "diverged", "step": 9}, ("step 9: the loss is not finite", True)),
        ({"event": "hang", "problem": "rank 1 waits"}, ("rank 1 waits", True)),
        ({"event": "data", "step": 0}, None),
        ({"event": "checkpoint"}, None),
        ({}, None),
    ],
)
def test_an_event_in_words(event: dict[str, object], words: tuple[str, bool] | None) -> None:
    assert event_words(event) == words
