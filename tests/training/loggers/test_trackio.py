"""trackio's own database holds every step once, whatever starts and kills there were."""

from pathlib import Path

import pytest
from opened_runs import CONFIG, opening_of, record_of

from weft.training.loggers.trackio import RUN_ID, TrackioLogger
from weft.training.loggers.wandb import figures_of

trackio = pytest.importorskip("trackio", reason="the optional package trackio is not installed")


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database of this test alone, as trackio reads TRACKIO_DIR once, at its import."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for module in ("sqlite_storage", "utils"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "database")


def rows_of(run) -> list[tuple[int, dict[str, float]]]:
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    return [
        (row["step"], {name: value for name, value in row.items() if name not in ("step", "timestamp")})
        for row in logs
    ]


def told(*records) -> list[tuple[int, dict[str, float]]]:
    return [(int(record["step"]), figures_of(record)) for record in records]


def run_dir_in(path: Path, name: str = "demo") -> Path:
    (path / name).mkdir(parents=True)
    return path / name


def test_trackio_itself_keeps_what_it_is_told(tmp_path: Path) -> None:
    logger = TrackioLogger(opening_of(run_dir_in(tmp_path)))
    records = [{"step": 0, "held_out_loss": 6.0}, record_of(0), record_of(1)]
    for record in records:
        logger.log(record)
    logger.flush()
    logger.finish()
    (run,) = trackio.Api().runs("weft")
    assert run.name == "demo"
    assert run.id == (tmp_path / "demo" / RUN_ID).read_text().strip()
    assert rows_of(run) == told(*records)
    assert {name: run.config[name] for name in CONFIG} == CONFIG


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    run_dir, begin = run_dir_in(tmp_path), {"step": 0, "held_out_loss": 6.0}
    killed = TrackioLogger(opening_of(run_dir))
    for record in (begin, *(record_of(step, 1.0) for step in range(4))):
        killed.log(record)
    killed.finish()
    kept = (record_of(0, 1.0), record_of(1, 1.0))
    resumed = TrackioLogger(opening_of(run_dir, first_step=2, steps=kept, held_out=(begin,)))
    again = [record_of(step, 2.0) for step in range(2, 6)]
    for record in again:
        resumed.log(record)
    resumed.finish()
    (run,) = trackio.Api().runs("weft")
    assert rows_of(run) == told(begin, *kept, *again)


def test_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    """trackio alone would resume the newest run of a name."""
    one, other = run_dir_in(tmp_path / "one"), run_dir_in(tmp_path / "other")
    for number, run_dir in enumerate((one, other, one)):
        logger = TrackioLogger(opening_of(run_dir))
        logger.log(record_of(0, float(number)))
        logger.finish()
    losses = {run.id: rows_of(run)[0][1]["loss"] for run in trackio.Api().runs("weft")}
    assert losses == {(one / RUN_ID).read_text().strip(): 2.0, (other / RUN_ID).read_text().strip(): 1.0}
