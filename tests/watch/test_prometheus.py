"""Prometheus' own parsers read back every figure of every run, whatever its names."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from weft.training.directory.overview import RunOverview, RunState
from weft.watch.prometheus import GAUGES, exposition

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
RUN = RunOverview(
    path=Path("runs/demo"),
    state=RunState.RUNNING,
    model="gpt-1m",
    plan="pp 2",
    done=3,
    steps=10,
    loss=2.5,
    held_out_loss=None,
    held_out_step=None,
    saved_step=2,
    step_s=0.25,
    predicted_step_s=0.125,
    tokens_per_s=4096.0,
    memory_bytes=1e9,
    newest_s=1.75e9,
)

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def read(text: str, parse=plain_text) -> Samples:
    """Values by metric and labels; each may be there once only."""
    found: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


def expected(runs: list[RunOverview]) -> Samples:
    found: Samples = {}
    for run in runs:
        named = {"run": run.path.name, "model": run.model}
        for gauge in GAUGES:
            if (value := gauge.value(run)) is not None:
                found.setdefault(gauge.name, {})[tuple(sorted(named.items()))] = value
        for state in RunState:
            labels = tuple(sorted({**named, "state": state.value}.items()))
            found.setdefault("weft_run_state", {})[labels] = float(state is run.state)
    return found


WORDS = st.text(min_size=1).filter(lambda word: Path("runs", word).name == word)
FIGURES = st.none() | st.floats(allow_nan=False)
RUNS = st.builds(
    RunOverview,
    path=WORDS.map(lambda word: Path("runs", word)),
    state=st.sampled_from(RunState),
    model=st.text(),
    plan=st.text(),
    done=st.integers(0, 10**9),
    steps=st.integers(0, 10**9),
    loss=FIGURES,
    held_out_loss=FIGURES,
    held_out_step=st.none(),
    saved_step=st.none() | st.integers(0, 10**9),
    step_s=FIGURES,
    predicted_step_s=FIGURES,
    tokens_per_s=FIGURES,
    memory_bytes=FIGURES,
    newest_s=st.floats(0, 1e10),
)


@given(st.lists(RUNS, max_size=4, unique_by=lambda run: run.path))
@example([replace(RUN, path=Path("runs", 'a "b" \\n \\\\ \n c'), model='\\"\n', loss=math.inf)])
def test_figures_and_labels_read_back(runs: list[RunOverview]) -> None:
    assert read(exposition(runs).body.decode()) == expected(runs)


def test_the_text_is_that_of_prometheus() -> None:
    lines = exposition([RUN]).body.decode().splitlines()
    assert lines[:3] == [
        "# HELP weft_run_step Finished steps.",
        "# TYPE weft_run_step gauge",
        'weft_run_step{model="gpt-1m",run="demo"} 3.0',
    ]
    assert 'weft_run_state{model="gpt-1m",run="demo",state="running"} 1.0' in lines
    assert 'weft_run_state{model="gpt-1m",run="demo",state="broken off"} 0.0' in lines
    assert not [line for line in lines if line.startswith("weft_run_held_out_loss")]


def test_a_scraper_that_asks_for_open_metrics_gets_it() -> None:
    plain, other = exposition([RUN]), exposition([RUN], OPEN_METRICS)
    assert plain.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert other.content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert other.body.endswith(b"# EOF\n")
    assert read(other.body.decode(), open_metrics) == read(plain.body.decode()) == expected([RUN])


def test_a_loss_that_is_no_number_stays_one() -> None:
    (value,) = read(exposition([replace(RUN, loss=math.nan)]).body.decode())["weft_run_loss"].values()
    assert math.isnan(value)


def test_runs_of_one_name_are_told_apart_by_their_paths() -> None:
    runs = [replace(RUN, path=Path(path)) for path in ("one/demo", "other/demo", "runs/alone")]
    names = {dict(labels)["run"] for labels in read(exposition(runs).body.decode())["weft_run_step"]}
    assert names == {"one/demo", "other/demo", "alone"}


def test_a_name_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    ((labels, _),) = read(exposition([replace(RUN, path=Path("runs/a\udcff"))]).body.decode())[
        "weft_run_step"
    ].items()
    assert dict(labels)["run"] == "a\ufffd"


def test_no_runs_are_no_samples() -> None:
    assert read(exposition([]).body.decode()) == {}
