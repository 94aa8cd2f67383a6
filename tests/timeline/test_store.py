"""Parquet files of timelines: what is written reads back, what is broken is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program.layouts import training_program
from timeline.timelines import timeline_of, unit_durations

from weft.errors import InputError
from weft.timeline.store import read_timeline, write_timeline
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline

same_folder = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def timeline() -> Timeline:
    program = training_program("breadth-first", 2, 4, (2, 2))
    return timeline_of(program, unit_durations(program), steps=2)


def assert_equal(one: Timeline, two: Timeline) -> None:
    assert (one.run, one.plan_id, one.clock) == (two.run, two.plan_id, two.clock)
    assert one.clock_error_ns == two.clock_error_ns
    for column in TIMELINE_COLUMNS:
        assert getattr(one, column).dtype == getattr(two, column).dtype, column
        assert np.array_equal(getattr(one, column), getattr(two, column)), column


def test_what_is_written_reads_back(tmp_path: Path, timeline: Timeline) -> None:
    named = replace(timeline, run="größer, 1", clock="monotonic", clock_error_ns=1_234)
    write_timeline(tmp_path / "t.parquet", named)
    assert_equal(read_timeline(tmp_path / "t.parquet"), named)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


READ_AGAIN = """
import sys
from pathlib import Path
from weft.timeline.store import read_timeline, write_timeline
write_timeline(Path(sys.argv[1]), read_timeline(Path(sys.argv[1])))
print("pandas" in sys.modules)
"""


@pytest.mark.processes
@pytest.mark.skipif(find_spec("pandas") is None, reason="needs pandas, which Arrow would import")
def test_a_file_is_read_and_written_without_an_import_of_pandas(tmp_path: Path, timeline: Timeline) -> None:
    write_timeline(tmp_path / "t.parquet", timeline)
    command = [sys.executable, "-c", READ_AGAIN, str(tmp_path / "t.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
    assert_equal(read_timeline(tmp_path / "t.parquet"), timeline)


def test_an_empty_timeline_reads_back(tmp_path: Path, timeline: Timeline) -> None:
    empty = replace(timeline, **{column: getattr(timeline, column)[:0] for column in TIMELINE_COLUMNS})
    write_timeline(tmp_path / "t.parquet", empty)
    assert_equal(read_timeline(tmp_path / "t.parquet"), empty)


def test_kinds_are_written_by_name(tmp_path: Path, timeline: Timeline) -> None:
    write_timeline(tmp_path / "t.parquet", timeline)
    table = pq.read_table(tmp_path / "t.parquet")
    assert set(table.column("kind").to_pylist()) >= {"forward", "backward", "send_activation", "reduce"}
    assert set(table.column("stream").to_pylist()) >= {"compute", "collective"}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such timeline file"):
        read_timeline(tmp_path / "none.parquet")


@same_folder
@given(data=st.binary(max_size=64))
def test_random_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(InputError, match="not a timeline file"):
        read_timeline(tmp_path / "t.parquet")


@same_folder
@given(data=st.data())
def test_a_changed_byte_never_changes_a_number_silently(
    tmp_path: Path, timeline: Timeline, data: st.DataObject
) -> None:
    path = tmp_path / "t.parquet"
    write_timeline(path, timeline)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        read = read_timeline(path)
    except InputError:
        return
    for column in TIMELINE_COLUMNS:
        assert np.array_equal(getattr(read, column), getattr(timeline, column)), column


@same_folder
@given(length=st.floats(0.0, 0.999))
def test_a_cut_file_is_refused(tmp_path: Path, timeline: Timeline, length: float) -> None:
    path = tmp_path / "t.parquet"
    write_timeline(path, timeline)
    content = path.read_bytes()
    path.write_bytes(content[: int(length * len(content))])
    with pytest.raises(InputError):
        read_timeline(path)


def rewrite(path: Path, timeline: Timeline, table: pa.Table | None = None, **metadata: str) -> None:
    write_timeline(path, timeline)
    original = pq.read_table(path)
    table = original if table is None else table
    known = {key.decode(): value.decode() for key, value in original.schema.metadata.items()}
    pq.write_table(table.replace_schema_metadata({**known, **metadata}), path)


def test_another_version_is_refused(tmp_path: Path, timeline: Timeline) -> None:
    rewrite(tmp_path / "t.parquet", timeline, **{"weft.version": "7"})
    with pytest.raises(InputError, match=r"has version 7 \(nearest valid: 1\)"):
        read_timeline(tmp_path / "t.parquet")


def test_another_programs_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"step": [1]}), tmp_path / "t.parquet")
    with pytest.raises(InputError) as caught:
        read_timeline(tmp_path / "t.parquet")
    text = str(caught.value)
    assert "it has no weft.clock" in text
    assert "has no column 'end_ns'" in text


def test_an_unknown_kind_is_named(tmp_path: Path, timeline: Timeline) -> None:
    write_timeline(tmp_path / "t.parquet", timeline)
    table = pq.read_table(tmp_path / "t.parquet")
    words = ["forwards"] * len(timeline)
    place = table.column_names.index("kind")
    rewrite(tmp_path / "t.parquet", timeline, table.set_column(place, "kind", pa.array(words)))
    with pytest.raises(InputError, match=r"kind 'forwards' is not known here \(nearest valid: forward\)"):
        read_timeline(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("values", "text"),
    [(pa.nulls(1, pa.int64()), "column 'end_ns' has empty cells"), (pa.array([1.5]), "Cannot cast")],
)
def test_columns_of_another_type_are_refused(
    tmp_path: Path, timeline: Timeline, values: pa.Array, text: str
) -> None:
    short = replace(timeline, **{column: getattr(timeline, column)[:1] for column in TIMELINE_COLUMNS})
    write_timeline(tmp_path / "t.parquet", short)
    table = pq.read_table(tmp_path / "t.parquet")
    place = table.column_names.index("end_ns")
    rewrite(tmp_path / "t.parquet", short, table.set_column(place, "end_ns", values))
    with pytest.raises(InputError, match=text):
        read_timeline(tmp_path / "t.parquet")
