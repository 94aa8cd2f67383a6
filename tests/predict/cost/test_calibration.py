from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from predict.cost.machines import MACHINE, MODEL, profile_of

from weft.describe.families import layer_graph
from weft.errors import InputError
from weft.predict.cost.calibration import (
    add_profile,
    load_machine,
    load_profile,
    save_machine,
    save_profile,
)
from weft.predict.profile import PROFILE_COLUMNS, LayerProfile, MachineMeasurement

GRAPH = layer_graph(MODEL)
PROFILE = profile_of(GRAPH)
KEY = (PROFILE.model_fingerprint, "cpu", PROFILE.sequence, PROFILE.precision)


def outcome(path: Path, home: Path) -> object:
    """What the file holds, or the refusal to read it."""
    try:
        return load_machine("cpu", home) if path.suffix == ".json" else load_profile(*KEY, home)
    except InputError as refused:
        return refused


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save_machine(MACHINE, tmp_path)
    path = save_profile(PROFILE, tmp_path)
    assert load_machine("cpu", tmp_path) == MACHINE
    assert load_profile(*KEY, tmp_path) == PROFILE
    assert path.read_text().splitlines()[1] == ",".join(PROFILE_COLUMNS)


def test_a_degree_that_is_measured_again_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    two = profile_of(GRAPH, tp=2, times=0.6, spread=0.05)
    assert add_profile(PROFILE, tmp_path) == add_profile(two, tmp_path)
    both = replace(PROFILE, timings=PROFILE.timings + two.timings, spread=0.05)
    assert load_profile(*KEY, tmp_path) == both
    slower = profile_of(GRAPH, times=2.0)
    add_profile(slower, tmp_path)
    assert load_profile(*KEY, tmp_path) == replace(both, timings=slower.timings + two.timings)
    # What nothing is left of says nothing of the spread.
    add_profile(replace(both, spread=0.01), tmp_path)
    assert load_profile(*KEY, tmp_path) == replace(both, spread=0.01)


def test_a_broken_profile_is_replaced(tmp_path: Path) -> None:
    path = save_profile(PROFILE, tmp_path)
    path.write_text("nonsense")
    add_profile(PROFILE, tmp_path)
    assert load_profile(*KEY, tmp_path) == PROFILE


def test_what_was_never_measured_is_nothing(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path)
    assert load_machine("cpu", tmp_path) is None
    assert load_profile(KEY[0], "cpu", PROFILE.sequence + 1, "fp32", tmp_path) is None


def test_the_one_slowdown_of_older_files_is_that_of_computations(tmp_path: Path) -> None:
    path = save_machine(MACHINE, tmp_path)
    older = {**json.loads(path.read_text()), "communication_slowdown": 1.25}
    del older["compute_slowdown"]
    path.write_text(json.dumps(older))
    assert load_machine("cpu", tmp_path) == replace(
        MACHINE, compute_slowdown=1.25, communication_slowdown=1.0
    )


def test_the_one_table_of_sums_of_older_files_is_that_of_two_ranks(tmp_path: Path) -> None:
    path = save_machine(MACHINE, tmp_path)
    older = json.loads(path.read_text())
    for table in (older.pop("collectives")["all_reduce"]["2"], []):
        path.write_text(json.dumps({**older, "all_reduce": table}))
        assert load_machine("cpu", tmp_path) == replace(
            MACHINE, collectives=MACHINE.collectives if table else {}
        )


def test_a_new_measurement_takes_the_place_of_the_old_and_leaves_nothing_behind(tmp_path: Path) -> None:
    newer = replace(MACHINE, launch_s=9e-6)
    paths = {save_machine(machine, tmp_path) for machine in (MACHINE, newer)}
    assert load_machine("cpu", tmp_path) == newer
    assert set(paths.pop().parent.iterdir()) == {tmp_path / "measurements" / "machine-cpu.json"}


@given(st.lists(st.text(max_size=12), min_size=2, max_size=2, unique=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_of_a_device_makes_a_file_of_its_own(tmp_path: Path, names: list[str]) -> None:
    paths = [save_machine(replace(MACHINE, device=name), tmp_path) for name in names]
    assert paths[0] != paths[1]
    for name in names:
        found = load_machine(name, tmp_path)
        assert found is not None
        assert found.device == name


@given(st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_broken_files_are_refused_in_one_line_or_still_mean_something(tmp_path: Path, seed: int) -> None:
    """Random bytes are changed, cut out or added; the reader answers or refuses, and never falls over."""
    chance = random.Random(seed)
    saved = save_machine(MACHINE, tmp_path) if chance.random() < 0.5 else save_profile(PROFILE, tmp_path)
    content = bytearray(saved.read_bytes())
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content))
        content[place : place + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 3))
    saved.write_bytes(bytes(content))
    answer = outcome(saved, tmp_path)
    if isinstance(answer, InputError):
        assert len(str(answer).splitlines()) == 1
        assert str(saved) in str(answer)
    else:
        assert isinstance(answer, MachineMeasurement | LayerProfile)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"version": 1', '"version": 2', "version 2"),
        ('"launch_s": 4e-06', '"launch_s": -1', "-1"),
        ('"launch_s": 4e-06', '"launch_s": NaN', "nan"),
        ("100000000.0,\n    50000000000.0", "100000.0,\n    50000000000.0", "rise"),
        ('"2": [', '"1": [', "two ranks or more"),
        ('"all_reduce"', '"all_sum"', "collectives are all_reduce"),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = save_machine(MACHINE, tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=reason):
        load_machine("cpu", tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [("forward_s", "fwd_s"), ("cpu,block,1,2", "cpu,block,1,0"), (",1,8,", ",1,")]
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str) -> None:
    path = save_profile(PROFILE, tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match="weft measure"):
        load_profile(*KEY, tmp_path)


def test_a_profile_of_several_devices_has_no_file(tmp_path: Path) -> None:
    other = profile_of(GRAPH, device="gpu")
    mixed: LayerProfile = replace(PROFILE, timings=PROFILE.timings + other.timings)
    with pytest.raises(InputError, match="one device"):
        save_profile(mixed, tmp_path)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        save_machine(MACHINE, home)
