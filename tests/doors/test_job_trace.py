"""Traces of jobs: laws of their replay, what they lose and by whom, and every form of their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doors.job_traces import chrome, even, kineto_folder, played, skeleton, slowed, times
from hypothesis import given
from hypothesis import strategies as st

from weft.doors.trace.job.files import read_job
from weft.doors.trace.job.losses import EQUAL_STAGES, NO_DELAYS, losses_of
from weft.doors.trace.job.operations import TYPES, operations_of
from weft.doors.trace.job.program import implied_program
from weft.doors.trace.job.remarks import remarks
from weft.doors.trace.job.score import OWN, replay_figures
from weft.errors import InputError

PUBLISHED = Path(os.environ.get("WEFT_PUBLISHED_TRACE", Path(__file__).parents[3] / "shared/data/traces"))

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 2))
SCHEDULES = st.sampled_from([("1f1b", 1), ("gpipe", 1), ("breadth-first", 2)])


@given(shape=SHAPES, schedule=SCHEDULES, seed=st.integers(0, 2**32 - 1))
def test_a_trace_that_the_simulator_made_is_replayed_to_the_nanosecond(
    shape: tuple[int, int, int, int], schedule: tuple[str, int], seed: int
) -> None:
    name, chunks = schedule
    stages, replicas, micro_batches, steps = shape
    drawn = np.random.default_rng(seed)

    def seconds(implied: Any) -> Any:
        some = drawn.integers(0, 10**6, (steps, len(implied.types))) / 1e9
        some[:, implied.receive_of[implied.receive_of >= 0]] = 0.0
        return some

    columns = played(skeleton(stages, replicas, micro_batches, steps, schedule=name, chunks=chunks), seconds)
    losses = losses_of(operations_of(columns, "drawn"))
    assert losses.simulated_s == pytest.approx(losses.measured_s, abs=1e-8)
    assert losses.delay_share == pytest.approx(0.0, abs=1e-4)


@given(shape=SHAPES, factor=st.floats(0.1, 10.0))
def test_slowdowns_do_not_depend_on_the_unit_of_time_or_on_the_order_of_rows(
    shape: tuple[int, int, int, int], factor: float
) -> None:
    columns = slowed(even(*shape), 1.5, stage=0)
    rows = np.random.default_rng(0).permutation(len(columns["step"])).tolist()
    other = {name: [values[row] for row in rows] for name, values in columns.items()}
    for name in ("start_ts", "duration"):
        other[name] = [factor * value for value in other[name]]
    one, two = (losses_of(operations_of(each, "trace")) for each in (columns, other))
    assert two.ideal_s == pytest.approx(factor * one.ideal_s, rel=1e-5)
    assert two.slowdown == pytest.approx(one.slowdown, rel=1e-5)
    assert dict(two.by_stage) == pytest.approx(dict(one.by_stage), rel=1e-5)


@given(shape=SHAPES)
def test_a_job_without_unusual_operations_loses_nothing(shape: tuple[int, int, int, int]) -> None:
    losses = losses_of(operations_of(even(*shape), "even"))
    assert losses.slowdown == pytest.approx(1.0, abs=1e-6)
    assert [*losses.by_stage.values(), *losses.by_operation.values()] == pytest.approx(
        [1.0] * (len(losses.by_stage) + len(losses.by_operation)), abs=1e-6
    )
    assert "nothing is to be gained" in remarks(losses)[0]


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("breadth-first", 2)])
def test_the_order_of_the_passes_has_its_name(name: str, chunks: int) -> None:
    operations = operations_of(even(schedule=name, chunks=chunks, micro_batches=8), "even")
    assert implied_program(operations).program.schedule == name


def test_a_slow_worker_is_found_and_named() -> None:
    losses = losses_of(operations_of(slowed(even(replicas=4), 1.4, stage=2, replica=1), "slow"))
    worst = losses.workers[0]
    assert (worst.stage, worst.replica) == (2, 1)
    assert worst.against_peers == pytest.approx(1.4)
    assert any("stage 2 of replica 1 (+40%)" in line for line in remarks(losses))
    assert losses.explained["usual worst workers"] > 0.9


def test_a_long_stage_costs_what_equal_stages_save() -> None:
    losses = losses_of(operations_of(slowed(even(), 1.6, stage=3), "long"))
    assert max(losses.by_stage, key=lambda one: losses.by_stage[one]) == 3
    assert any(line.startswith("stage 3, which has the loss: 48.0 ms") for line in remarks(losses))
    # The slowest stage sets the pace of 1f1b: 6 micro-batches of 48 ms, or of 34.5 ms, which fill it later.
    assert losses.what_if_s[EQUAL_STAGES] < losses.what_if_s[NO_DELAYS] - 60e-3
    assert losses.ideal_s == pytest.approx(losses.what_if_s[EQUAL_STAGES], rel=1e-3)


def test_time_between_operations_is_a_delay_and_no_loss_of_ranks() -> None:
    columns = {name: list(values) for name, values in even().items()}
    forward = [
        row
        for row, name in enumerate(columns["optype"])
        if name == "forward-compute" and columns["mb_id"][row] == 0
    ]
    late = {columns["step"][row]: columns["start_ts"][row] for row in forward if columns["stage"][row] == 0}
    columns["start_ts"] = [
        start + 0.05 * (start >= late[step])
        for start, step in zip(columns["start_ts"], columns["step"], strict=True)
    ]
    losses = losses_of(operations_of(columns, "late"))
    assert losses.measured_s.mean() - losses.simulated_s.mean() == pytest.approx(0.05, abs=2e-3)
    assert losses.slowdown < 1.02
    assert any("lies between operations" in line for line in remarks(losses))


def test_a_step_with_other_operations_is_left_out_and_named() -> None:
    columns = {name: list(values) for name, values in even(steps=3).items()}
    row = next(row for row, step in enumerate(columns["step"]) if step == 11)
    broken = {name: [*values[:row], *values[row + 1 :]] for name, values in columns.items()}
    operations = operations_of(broken, "broken")
    assert operations.steps == (10, 12)
    assert operations.left_out == ("steps with other operations than most: 11",)


def test_messages_that_match_no_pass_are_refused() -> None:
    columns = {name: list(values) for name, values in even(steps=1).items()}
    gone = {("forward-recv", 1), ("forward-recv", 2)}
    kept = [
        row
        for row in range(len(columns["step"]))
        if not (columns["stage"][row] == 1 and (columns["optype"][row], columns["seq_id"][row]) in gone)
    ]
    broken = {name: [values[row] for row in kept] for name, values in columns.items()}
    with pytest.raises(InputError, match=r"rank 2 \(stage 1\) has 4 forward-recv for 6 passes"):
        losses_of(operations_of(broken, "broken"))


def test_every_form_of_file_says_the_same(tmp_path: Path) -> None:
    columns = slowed(even(), 1.3, stage=1)
    pq.write_table(pa.table(dict(columns)), tmp_path / "trace.parquet")
    (tmp_path / "trace.json").write_text(json.dumps(chrome(columns)))
    paths = (tmp_path / "trace.parquet", tmp_path / "trace.json", kineto_folder(columns, tmp_path / "ranks"))
    found = [read_job(path) for path in paths]
    expected = times(operations_of(columns, "table"))
    for one in found:
        assert one is not None
        assert times(one) == expected
        assert losses_of(one).slowdown == pytest.approx(
            losses_of(operations_of(columns, "t")).slowdown, rel=1e-4
        )


def test_rows_that_stand_twice_are_refused() -> None:
    columns = even()
    with pytest.raises(InputError, match="two passes of a rank begin at the same time"):
        operations_of({name: [*values, *values] for name, values in columns.items()}, "job")


def test_other_files_are_no_jobs_or_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(
        '{"traceEvents": [{"ph": "X", "name": "gemm", "ts": 1, "dur": 2}]}'
    )
    (tmp_path / "other.toml").write_text("[training]\n")
    assert read_job(tmp_path / "kernels.json") is None
    assert read_job(tmp_path / "other.toml") is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "texts.parquet")
    for name, words in (
        ("empty", "without traces"),
        ("run", f"a run directory; `weft compare {tmp_path / 'run'}` explains its steps"),
        ("cut.parquet", "not a Parquet file"),
        ("texts.parquet", "dp_rank, stage, step, optype, start_ts, duration missing"),
    ):
        with pytest.raises(InputError, match=words):
            read_job(tmp_path / name)


CELLS = st.one_of(
    st.none(), st.integers(-2, 3), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3)
)


@given(data=st.data())
def test_a_broken_table_is_refused_and_never_a_traceback(data: st.DataObject) -> None:
    columns = {name: list(values) for name, values in even(2, 2, 2, 1).items()}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(columns)))
        row = data.draw(st.integers(0, len(columns["step"]) - 1))
        columns[name][row] = data.draw(st.one_of(st.sampled_from(sorted(TYPES)), CELLS))
    try:
        losses_of(operations_of(columns, "broken")).record()
    except InputError:
        return


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published trace (WEFT_PUBLISHED_TRACE)")
def test_the_published_analysis_of_a_real_job() -> None:
    """The analysis is that of ByteDance-Seed/StragglerAnalysis (Apache-2.0), published beside the trace."""
    operations = read_job(PUBLISHED / "trace-ST.parquet")
    assert operations is not None
    losses, published = losses_of(operations), json.loads((PUBLISHED / "result-ST.json").read_text())
    assert losses.implied.program.schedule == "1f1b"
    ideal = next(iter(published["step_t_noblk"].values()))
    assert losses.ideal_s == pytest.approx(ideal, rel=1e-5)
    assert losses.measured_s.tolist() == pytest.approx(list(published["step_t_base"].values()), rel=1e-6)
    assert losses.simulated_s.tolist() == pytest.approx(list(published["step_t_nodelay"].values()), rel=1e-3)
    for mine, theirs in (
        (losses.by_stage, published["blocking_decompose_by_stage"]),
        (losses.by_replica, published["blocking_decompose_by_dp_rank"]),
    ):
        assert {str(one): value for one, value in mine.items()} == pytest.approx(theirs, rel=1e-3)
    operation = published["blocking_decompose_by_optype"]
    shared = losses.by_operation.keys() & operation.keys()
    assert len(shared) == 9
    assert [losses.by_operation[name] for name in sorted(shared)] == pytest.approx(
        [operation[name] for name in sorted(shared)], rel=1e-5
    )
    for file, key, change in (
        ("ms-ST.json", "Ms", "a usual last stage"),
        ("mw-ST.json", "Mw", "usual worst workers"),
    ):
        expected = json.loads((PUBLISHED / file).read_text())[key]
        assert losses.explained[change] == pytest.approx(expected, abs=1e-3)
    own = replay_figures(losses)[OWN]
    assert own.mape is not None
    assert own.mape < 0.02
