"""OpenTelemetry: a run's newest figures as gauges, over OTLP/HTTP to any collector; needs its packages."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from weft.errors import RunError
from weft.training.loggers.feed import Opening, Record, is_held_out
from weft.training.loggers.wandb import figures_of


class GaugeName(NamedTuple):
    """A gauge's name, and its unit in UCUM, by OpenTelemetry's conventions."""

    name: str
    unit: str = ""


KNOWN_GAUGES: Mapping[str, GaugeName] = {
    "loss": GaugeName("weft.train.loss", "{nat}"),
    "learning_rate": GaugeName("weft.train.learning_rate", "1"),
    "step_s": GaugeName("weft.train.step.duration", "s"),
    "predicted_step_s": GaugeName("weft.train.step.predicted_duration", "s"),
    "tokens_per_s": GaugeName("weft.train.throughput", "{token}/s"),
    "epoch": GaugeName("weft.train.epoch", "{epoch}"),
    "max_rss_bytes": GaugeName("weft.train.memory.peak", "By"),
    "max_device_bytes": GaugeName("weft.train.device_memory.peak", "By"),
    "held_out_loss": GaugeName("weft.held_out.loss", "{nat}"),
}
FINISHED_STEPS = GaugeName("weft.train.finished_steps", "{step}")


def gauge_name(figure: str) -> GaugeName:
    """Return the gauge of a figure; one of only some runs has no unit."""
    if figure in KNOWN_GAUGES:
        return KNOWN_GAUGES[figure]
    if figure.startswith("held_out_"):
        return GaugeName(f"weft.held_out.{figure.removeprefix('held_out_')}")
    return GaugeName(f"weft.train.{figure}")


class OpenTelemetryLogger:
    """A logger to a collector, set by OpenTelemetry's variables (OTEL_EXPORTER_OTLP_ENDPOINT, ...).

    The SDK exports the newest figures every OTEL_METRIC_EXPORT_INTERVAL milliseconds, and at the end. It
    tries again after a failure.
    """

    def __init__(self, opening: Opening) -> None:
        self._exporter = CountingExporter()
        reader = PeriodicExportingMetricReader(self._exporter)
        # The feed ends a logger in time; a hook at the interpreter's end could wait for a lost collector.
        self._provider = MeterProvider([reader], resource_of(opening), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("weft")
        self._gauges: dict[GaugeName, Any] = {}

    def log(self, record: Record) -> None:
        for figure, value in figures_of(record).items():
            self._set(gauge_name(figure), value)
        if not is_held_out(record):
            self._set(FINISHED_STEPS, int(record["step"]) + 1)

    def flush(self) -> None:
        """Do nothing: the SDK exports by its own clock."""

    def finish(self) -> None:
        """Export the last figures.

        Raises:
            RunError: if exports have failed.
        """
        self._provider.shutdown()
        if self._exporter.failed:
            counts = f"{self._exporter.failed} of {self._exporter.exports} exports failed"
            raise RunError(f"{counts}; the log of rank 0 has the reasons")

    def _set(self, gauge: GaugeName, value: float) -> None:
        if gauge not in self._gauges:
            self._gauges[gauge] = self._meter.create_gauge(gauge.name, gauge.unit)
        self._gauges[gauge].set(value)


class CountingExporter(OTLPMetricExporter):
    """The exporter of the SDK, which drops failed exports; they are counted here."""

    exports = failed = 0

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        self.exports += 1
        self.failed += 1
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            self.failed -= 1
        return result


def resource_of(opening: Opening) -> Resource:
    """Return the attributes of all metrics of a run; the environment's own take precedence.

    The instance stays the same when the run is resumed on its machine.
    """
    place = f"file://{socket.gethostname()}{opening.run_dir.resolve()}"
    plan = opening.config["plan"]
    described = Resource.create(
        {
            "service.name": "weft",
            "service.instance.id": str(uuid5(NAMESPACE_URL, place)),
            "weft.run.name": opening.run_dir.name,
            "weft.model.name": str(plan["model"]),
            "weft.plan.id": str(plan["plan_id"]),
        }
    )
    return described.merge(OTELResourceDetector().detect())
