"""TensorBoard's own reader finds what was logged, and nothing twice."""

from pathlib import Path

import pytest
from opened_runs import opening_of, record_of

from weft.training.loggers.tensorboard import FOLDER, TensorBoardLogger

pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")


def reader(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_dir / FOLDER)).Reload()


def test_every_figure_is_a_scalar_of_its_name(tmp_path: Path) -> None:
    logger = TensorBoardLogger(opening_of(tmp_path))
    logger.log({"step": 0, "held_out_loss": 6.0})
    for step in range(3):
        logger.log(record_of(step))
    logger.finish()
    read = reader(tmp_path)
    assert set(read.Tags()["scalars"]) == {*record_of(0), "held_out_loss"} - {"step", "time_s"}
    assert [(one.wall_time, one.step, one.value) for one in read.Scalars("loss")] == [
        (1000.0 + step, step, 5.0 - step) for step in range(3)
    ]
    assert [one.value for one in read.Scalars("predicted_step_s")] == [0.4375] * 3
    assert b'"plan_id": "0123"' in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_steps_are_there_when_nothing_waits(tmp_path: Path) -> None:
    logger = TensorBoardLogger(opening_of(tmp_path))
    logger.log(record_of(0))
    logger.flush()
    assert [one.step for one in reader(tmp_path).Scalars("loss")] == [0]


def test_steps_that_are_done_again_are_hidden(tmp_path: Path) -> None:
    before = TensorBoardLogger(opening_of(tmp_path))
    for step in range(4):
        before.log(record_of(step, loss=1.0))
    before.flush()
    after = TensorBoardLogger(opening_of(tmp_path, first_step=2))
    for step in range(2, 6):
        after.log(record_of(step, loss=2.0))
    after.finish()
    found = [(one.step, one.value) for one in reader(tmp_path).Scalars("loss")]
    assert found == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0), (5, 2.0)]
