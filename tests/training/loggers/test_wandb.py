"""wandb's own files hold what was logged, and modules like it are told what they know."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb_like
from opened_runs import CONFIG, opening_of, record_of

from weft.training.loggers.wandb import RUN_ID, WandbLogger

BLOCK_BYTES, HEADER_BYTES = 32768, 7


def parts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Kinds (1 whole, 2 first, 3 middle, 4 last) and bytes of the parts in a log of LevelDB's format."""
    data, at = path.read_bytes(), HEADER_BYTES
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        yield kind, data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length


def records(path: Path) -> Iterator:
    from wandb.proto.wandb_internal_pb2 import Record

    whole = b""
    for kind, part in parts(path):
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield Record.FromString(whole)


def wait_for_end(path: Path) -> None:
    """wandb's own process writes the file, and may end it after `finish` has returned."""
    for _ in range(2000):
        if any(record.HasField("exit") for record in records(path)):
            return
        time.sleep(0.01)
    raise AssertionError(f"no end of {path} within 20 s")


def history(path: Path) -> list[dict[str, float]]:
    """What was logged, step by step."""
    rows = [record.history for record in records(path) if record.HasField("history")]
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the optional package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("offline")
@pytest.mark.processes
def test_wandb_itself_writes_what_it_is_told(tmp_path: Path) -> None:
    for first in (0, 2):
        logger = WandbLogger("wandb", opening_of(tmp_path, first_step=first))
        for step in range(first, 4):
            logger.log(record_of(step))
        logger.finish()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    identity = (tmp_path / RUN_ID).read_text().strip()
    assert {file.name for file in files} == {f"run-{identity}.wandb"}
    for file, first in zip(files, (0, 2), strict=True):
        wait_for_end(file)
        logged = history(file)
        assert [row["_step"] for row in logged] == list(range(first, 4))
        assert [row["loss"] for row in logged] == [5.0 - step for step in range(first, 4)]
        (run,) = {record.run.SerializeToString() for record in records(file) if record.HasField("run")}
        assert b"weft" in run
        assert b'"plan_id":"0123"' in run.replace(b" ", b"")


def test_a_module_like_wandb_is_told_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    wandb_like.CALLS.clear()
    logger = WandbLogger("wandb_like", opening_of(tmp_path))
    logger.log(record_of(3))
    logger.flush()
    logger.finish()
    figures = {name: value for name, value in record_of(3).items() if name not in ("step", "time_s")}
    calls = list(wandb_like.CALLS)
    assert calls == [
        ("init", {"project": "weft", "name": tmp_path.name, "config": CONFIG}),
        ("log", (3, figures)),
        ("finish", None),
    ]
    assert not (tmp_path / RUN_ID).exists()


def test_the_project_can_be_set_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "looms")
    wandb_like.CALLS.clear()
    WandbLogger("wandb_like", opening_of(tmp_path))
    assert wandb_like.CALLS[0][1]["project"] == "looms"
