"""Files of measured steps: what was written is read, and what is something else is refused in a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from predict.cost.machines import CPU, MODEL, cluster
from predict.observed import observed, several

from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.errors import InputError
from weft.predict.corrections_file import (
    Residuals,
    empty_residuals,
    hardware_of,
    load_residuals,
    read_residuals,
    residual_files,
    save_residuals,
)

GRAPH = layer_graph(MODEL)
HERE = cluster(device=CPU)
KEY = (GRAPH, "fp32", HERE)
FILLED = empty_residuals(*KEY).with_more(several([1.0, 1.5, 2.0], computations=1.2))


@given(st.lists(st.floats(0.1, 10.0), max_size=5), st.floats(0.0, 1e10))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_saved_is_loaded(tmp_path: Path, ratios: list[float], time_s: float) -> None:
    some = [*several(ratios, computations=1.7), observed(1.0, time_s=time_s, source="layer profile")]
    saved = empty_residuals(*KEY).with_more(some)
    path = save_residuals(saved, tmp_path)
    assert load_residuals(*KEY, tmp_path) == saved
    assert residual_files(tmp_path) == [path]
    assert len(saved.of({"cpu": "layer profile"})) == 1
    assert sum(len(one) for one in saved.by_sources()) == len(saved.observations)


def test_what_was_never_measured_is_empty_and_leaves_no_file(tmp_path: Path) -> None:
    assert load_residuals(*KEY, tmp_path).observations == ()
    save_residuals(FILLED, tmp_path)
    assert load_residuals(GRAPH, "fp64", HERE, tmp_path).observations == ()
    assert len(residual_files(tmp_path)) == 1


def test_a_clock_that_was_read_anew_is_the_same_hardware_and_another_link_is_not() -> None:
    (group,) = HERE.groups
    faster = replace(CPU, flops_per_s={"fp32": 2e11}, memory_bytes=1)

    def changed(**changes: object) -> Cluster:
        return replace(HERE, name="other", groups=(replace(group, **changes),))  # type: ignore[arg-type]

    assert hardware_of(changed(device=faster)) == hardware_of(HERE)
    assert hardware_of(changed(link=replace(group.link, latency_s=1.0))) != hardware_of(HERE)
    assert hardware_of(changed(count=group.count + 1)) != hardware_of(HERE)
    assert hardware_of(changed(speeds=(0.5,) * group.devices)) != hardware_of(HERE)


@pytest.mark.parametrize("name", ["model_fingerprint", "precision", "hardware"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    path = save_residuals(FILLED, tmp_path)
    path.write_text(FILLED.model_copy(update={name: "another"}).model_dump_json())
    with pytest.raises(InputError) as refused:
        load_residuals(*KEY, tmp_path)
    (violation,) = refused.value.violations
    wanted = getattr(FILLED, name)
    assert str(violation) == (
        f"{path}: was learned with {name.replace('_', ' ')} another, not {wanted}; delete it"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version: 2: must be 1"),
        ({"observation": []}, "observation: unknown key"),
        ({"observations": [{}]}, "observations[0].plan_id: missing"),
        (
            {"observations": [{**observed(1.0).model_dump(mode="json"), "measured_step_s": 0.0}]},
            "observations[0].measured_step_s: 0.0: must be greater than 0",
        ),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = tmp_path / "corrections-x.json"
    path.write_text(json.dumps({**FILLED.model_dump(mode="json"), **change}))
    with pytest.raises(InputError) as refused:
        read_residuals(path)
    assert any(problem in str(one) for one in refused.value.violations), refused.value


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_is_refused(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "corrections-x.json"
    path.write_bytes(junk)
    with pytest.raises(InputError):
        read_residuals(path)


def test_a_file_says_what_it_is_of() -> None:
    assert FILLED.model == GRAPH.name
    assert Residuals.model_validate_json(FILLED.model_dump_json()) == FILLED
