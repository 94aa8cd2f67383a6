"""A run that is read again and again: at any moment as much is known as a fresh reader knows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.training.directory.live_run import LineFile, LiveRun

records = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=5), max_size=3)


@given(lines=st.lists(records, max_size=20), data=st.data())
def test_pieces_of_a_file_are_its_lines(lines: list[dict[str, object]], data: st.DataObject) -> None:
    """However a writer's bytes reach the file, each line is read once, whole and in order."""
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    with TemporaryDirectory() as folder:
        path, found = Path(folder) / "lines", []
        file = LineFile(path)
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            with open(path, "ab") as writer:
                writer.write(text[start:end])
            found += file.look()[1]
    assert found == lines


def test_another_file_of_the_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    assert file.look() == (False, [])
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert file.look() == (True, [{"a": 1}, {"a": 2}])
    assert file.look() == (False, [])
    path.write_text('{"a": 3}\n')  # shorter than before
    assert file.look() == (True, [{"a": 3}])
    path.unlink()
    path.write_text('{"a": 5}\n')  # as long as before, perhaps in the same place on the disk
    assert file.look() == (True, [{"a": 5}])
    other = tmp_path / "other"
    other.write_text('{"a": 4}\n' * 5)
    other.replace(path)
    assert file.look() == (True, [{"a": 4}] * 5)


def test_lines_by_another_hand_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n[1]\n{"a": \n\xff\n3\n{"a": 2}\n')
    assert LineFile(path).look()[1] == [{"a": 1}, {"a": 2}]


def write(path: Path, *steps: int, **more: float) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        for step in steps:
            figures = {"step_s": 0.5, "tokens_per_s": 8.0, "time_s": 100.0 + step, **more}
            file.write(json.dumps({"step": step, "loss": 5.0 - step, **figures}) + "\n")


def test_repeated_steps_replace_those_of_the_former_start(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    write(tmp_path, 0, 1, 2, 3)
    run.look()
    write(tmp_path, 2)
    run.look()
    assert [(one.step, one.line) for one in run.steps] == [(0, 0), (1, 1), (2, 4)]
    assert [one.step for one in run.steps_after(4)] == [2]
    assert [one.step for one in run.steps_after(1)] == [1, 2]
    assert run.lines == 5


def test_figures_that_a_run_does_not_record_are_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.0, "step_s": null}\n{"loss": 1.0}\n')
    run = LiveRun(tmp_path)
    run.look()
    (one,) = run.steps
    assert (one.loss, one.time_s) == (2.0, 0.0)
    assert math.isnan(one.step_s)
    assert math.isnan(one.memory_bytes)


def test_memory_is_an_accelerators_where_it_has_one(tmp_path: Path) -> None:
    write(tmp_path, 0, max_rss_bytes=7.0)
    write(tmp_path, 1, max_rss_bytes=7.0, tensor_bytes=5.0)
    write(tmp_path, 2, max_rss_bytes=7.0, tensor_bytes=5.0, max_device_bytes=3.0)
    run = LiveRun(tmp_path)
    run.look()
    assert [one.memory_bytes for one in run.steps] == [7.0, 5.0, 3.0]


def test_the_last_evaluation_of_a_step_counts(tmp_path: Path) -> None:
    events = [
        {"event": "started", "step": 0, "held_out_loss": 6.0},
        {"event": "checkpoint", "step": 5},
        {"event": "evaluated", "step": 5, "held_out_loss": 5.0},
        {"event": "evaluated", "step": 5, "held_out_loss": 4.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    run = LiveRun(tmp_path)
    run.look()
    assert run.held_out_after(0) == [(0, 6.0), (5, 4.0)]
    assert run.held_out_after(3) == [(5, 4.0)]


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan.json: No such file"):
        _ = LiveRun(tmp_path).file
    (tmp_path / "run.toml").write_text("[train]\nsteps = 'many'\n")
    with pytest.raises(InputError, match="no steps can be read"):
        _ = LiveRun(tmp_path).steps_in_all
