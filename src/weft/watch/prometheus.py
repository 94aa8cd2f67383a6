"""The newest figures of runs, as Prometheus and other readers of OpenMetrics scrape them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from weft.training.directory.overview import RunOverview, RunState


class Exposition(NamedTuple):
    """The body of an answer to a scrape, and its content type."""

    body: bytes
    content_type: str


class RunGauge(NamedTuple):
    """A gauge of every run: its name, its help, and its value, which a run may lack."""

    name: str
    words: str
    value: Callable[[RunOverview], float | None]


# A resumed run repeats steps, so even their number may fall: none of these is a counter.
GAUGES = (
    RunGauge("weft_run_step", "Finished steps.", lambda run: run.done),
    RunGauge("weft_run_steps", "Steps of the run file.", lambda run: run.steps),
    RunGauge(
        "weft_run_loss", "Loss of the newest step, per target, in the unit of the task.", lambda run: run.loss
    ),
    RunGauge(
        "weft_run_held_out_loss",
        "Loss of the newest evaluation on held-out samples, per target.",
        lambda run: run.held_out_loss,
    ),
    RunGauge("weft_run_step_seconds", "Median time of the newest steps.", lambda run: run.step_s),
    RunGauge(
        "weft_run_predicted_step_seconds", "Predicted time of a step.", lambda run: run.predicted_step_s
    ),
    RunGauge(
        "weft_run_tokens_per_second",
        "Median tokens (images: samples) per second of the newest steps.",
        lambda run: run.tokens_per_s,
    ),
    RunGauge("weft_run_peak_memory_bytes", "Peak memory of the first rank.", lambda run: run.memory_bytes),
    RunGauge("weft_run_saved_step", "Finished steps in the newest checkpoint.", lambda run: run.saved_step),
    RunGauge(
        "weft_run_last_update_timestamp_seconds",
        "Time of the newest line of metrics or events.",
        lambda run: run.newest_s or None,
    ),
)


def exposition(runs: Sequence[RunOverview], accept: str = "") -> Exposition:
    """Return the figures of runs in the format that a scrape asks for.

    Args:
        accept: the `Accept` header; OpenMetrics if it names that format, else Prometheus' text.
    """
    if "application/openmetrics-text" in accept:
        return Exposition(openmetrics.generate_latest(_RunFamilies(runs)), openmetrics.CONTENT_TYPE_LATEST)
    return Exposition(generate_latest(_RunFamilies(runs)), CONTENT_TYPE_PLAIN_0_0_4)


@dataclass(frozen=True)
class _RunFamilies(Collector):
    """Metric families of runs; each run is known by its labels."""

    runs: Sequence[RunOverview]

    def collect(self) -> Iterator[Metric]:
        labelled = list(zip(_labels(self.runs), self.runs, strict=True))
        for gauge in GAUGES:
            family = Metric(gauge.name, gauge.words, "gauge")
            for labels, run in labelled:
                if (value := gauge.value(run)) is not None:
                    family.add_sample(gauge.name, dict(labels), value)
            yield family
        states = Metric("weft_run_state", "1 for the state of a run, 0 for the others.", "gauge")
        for labels, run in labelled:
            for state in RunState:
                states.add_sample("weft_run_state", {**labels, "state": state}, float(state is run.state))
        yield states


def _labels(runs: Sequence[RunOverview]) -> list[Mapping[str, str]]:
    """Return the labels of each run; of several with one name, the whole path tells them apart."""
    counts = Counter(run.path.name for run in runs)
    return [
        {"run": _text(run.path.name if counts[run.path.name] == 1 else run.path), "model": run.model}
        for run in runs
    ]


def _text(path: str | Path) -> str:
    """Return a path as UTF-8 can write it; names of files may have any bytes."""
    return os.fsencode(path).decode(errors="replace")
