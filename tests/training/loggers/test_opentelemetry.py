"""A real receiver gets a run's figures as OpenTelemetry names them, and none stops or delays the run."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opened_runs import opening_of, record_of

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra is not installed")

from otlp_receiver import OtlpReceiver, otlp_receiver

from weft.errors import RunError
from weft.training.loggers.feed import Feed, Feeds
from weft.training.loggers.opentelemetry import KNOWN_GAUGES, OpenTelemetryLogger, gauge_name

NEVER_MS = "3600000"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's; exports only at the end of a logger."""
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", NEVER_MS)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with otlp_receiver() as one:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.endpoint)
        yield one


def run_dir_in(path: Path) -> Path:
    (path / "demo").mkdir()
    return path / "demo"


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("waited for 10 s")


def test_the_newest_figures_arrive_as_gauges(receiver: OtlpReceiver, tmp_path: Path) -> None:
    logger = OpenTelemetryLogger(opening_of(run_dir_in(tmp_path)))
    logger.log({"step": 0, "held_out_loss": 6.0, "held_out_accuracy": 0.25})
    for step in range(3):
        logger.log({**record_of(step), "gradient_norm": 1.5})
    logger.flush()
    logger.finish()
    assert receiver.values == {
        "weft.train.finished_steps": 3,
        "weft.train.loss": 3.0,
        "weft.train.learning_rate": 0.125,
        "weft.train.step.duration": 0.5,
        "weft.train.step.predicted_duration": 0.4375,
        "weft.train.throughput": 1000.0,
        "weft.train.epoch": 0,
        "weft.train.memory.peak": 4096,
        "weft.train.gradient_norm": 1.5,
        "weft.held_out.loss": 6.0,
        "weft.held_out.accuracy": 0.25,
    }
    assert receiver.units["weft.train.step.duration"] == "s"
    assert receiver.units["weft.train.memory.peak"] == "By"


def test_the_resource_names_the_run_its_model_and_its_plan(receiver: OtlpReceiver, tmp_path: Path) -> None:
    run_dir, found = run_dir_in(tmp_path), []
    for _ in range(2):
        logger = OpenTelemetryLogger(opening_of(run_dir))
        logger.log(record_of(0))
        logger.finish()
        found.append(receiver.resource)
    assert found[0] == found[1]
    named = {"service.name": "weft", "weft.run.name": "demo", "weft.model.name": "gpt-tiny"}
    assert (
        found[0].items() >= {**named, "weft.plan.id": "0123", "telemetry.sdk.name": "opentelemetry"}.items()
    )


def test_variables_of_opentelemetry_win(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "looms")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,weft.run.name=other")
    logger = OpenTelemetryLogger(opening_of(tmp_path))
    logger.log(record_of(0))
    logger.finish()
    given = {"service.name": "looms", "deployment.environment.name": "lab", "weft.run.name": "other"}
    assert receiver.resource.items() >= {**given, "weft.model.name": "gpt-tiny"}.items()


def test_figures_arrive_while_the_run_goes_on(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    logger = OpenTelemetryLogger(opening_of(tmp_path))
    for step in range(2):
        logger.log(record_of(step))
        wait_for(lambda step=step: receiver.values.get("weft.train.loss") == 5.0 - step)
    logger.finish()


def test_a_receiver_that_is_down_stops_nothing_and_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    logger = OpenTelemetryLogger(opening_of(tmp_path))
    for step in range(3):
        logger.log(record_of(step))
    with pytest.raises(RunError, match="1 of 1 exports failed"):
        logger.finish()


def test_a_receiver_that_does_not_answer_delays_nothing(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    receiver.gate.clear()
    problems: list[tuple[str, str]] = []
    feed = Feed("opentelemetry", lambda: OpenTelemetryLogger(opening_of(tmp_path)))
    feeds = Feeds([feed], on_problem=lambda *problem: problems.append(problem))
    feeds.step(record_of(0))
    wait_for(lambda: len(receiver.requests) == 1)
    for step in range(1, 100):
        feeds.step(record_of(step))
    wait_for(lambda: feed._records.empty())
    assert (feed.dropped, len(receiver.requests)) == (0, 1)
    feeds.close(timeout_s=0.05)
    assert problems == [("opentelemetry", "not finished within 0.05 s; its last records may be lost")]
    receiver.gate.set()
    wait_for(lambda: receiver.values.get("weft.train.finished_steps") == 100)


@pytest.mark.parametrize("figure", [*KNOWN_GAUGES, "gradient_norm", "held_out_accuracy", "held_out_f1"])
def test_names_are_those_of_opentelemetry(figure: str) -> None:
    """Dotted words in small letters, without the unit, which stands beside the name."""
    name = gauge_name(figure).name
    assert re.fullmatch(r"weft(\.[a-z][a-z0-9_]*)+", name)
    assert not name.endswith(("_s", "_bytes", "_per_s"))
