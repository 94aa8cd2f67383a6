"""When a run asks for another plan: after so many of its own steps, at the end of a measured cycle."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from weft.planning.measured_changes import MeasuredChange
from weft.training import plan_changes
from weft.training.plan_changes import PlanChanges


@pytest.mark.parametrize(
    ("every", "cycle", "begun", "cycles", "asked"),
    [
        (0, 1, 0, 0, {}),
        (4, 1, 0, 0, {4: (1, 3), 8: (1, 7), 12: (1, 11)}),
        # A run that goes on from a border has no measured steps there.
        (4, 1, 4, 0, {8: (5, 7), 12: (5, 11)}),
        (4, 1, 3, 0, {7: (4, 6), 8: (4, 7), 12: (4, 11)}),
        (4, 3, 0, 0, {6: (1, 5), 9: (1, 8), 12: (1, 11)}),
        (8, 5, 0, 0, {10: (1, 9)}),
        # Windows fill in the first whole cycle, and two others are measured.
        (1, 2, 0, 2, {6: (2, 5), 8: (2, 7), 10: (2, 9), 12: (2, 11)}),
        (8, 2, 3, 2, {10: (6, 9)}),
        (1, 4, 1, 2, {}),
    ],
)
def test_a_run_asks_at_the_end_of_a_cycle_and_sees_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    cycle: int,
    begun: int,
    cycles: int,
    asked: dict[int, tuple[int, int]],
) -> None:
    change = MeasuredChange(
        key="one.every",
        every=lambda plan: every,
        decide=lambda job, measured: None,
        unmeasured="one not measured",
        cycles=cycles,
    )
    monkeypatch.setattr(plan_changes, "together", nullcontext)
    monkeypatch.setattr(plan_changes, "from_first_rank", lambda value: value)
    monkeypatch.setattr(plan_changes, "changes_of", lambda plan: (change,) if every else ())
    run: Any = SimpleNamespace(
        job=SimpleNamespace(plan=None),
        program=SimpleNamespace(steps_per_cycle=cycle),
        runtime=SimpleNamespace(rank=0),
    )
    found: dict[int, tuple[int, int]] = {}
    changes, waiting = PlanChanges(run, begun), PlanChanges(run, begun)
    for done in range(begun + 1, 14):

        def decided(change: MeasuredChange, steps: range, done: int = done) -> None:
            found[done] = steps.start, steps.stop

        monkeypatch.setattr(changes, "_decided", decided)
        assert changes.after(done) is None
        monkeypatch.setattr(waiting, "_decided", lambda *_: pytest.fail("it waits"))
        assert waiting.after(done, waits=True) is None
    assert found == asked
    # What waits asks at the next border.
    late: list[range] = []
    monkeypatch.setattr(waiting, "_decided", lambda change, steps: late.append(steps))
    waiting.after(20 * cycle + begun // cycle * cycle)
    assert len(late) == bool(every)
