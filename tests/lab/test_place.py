"""What a launcher inside a lab reads from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.clusters import mixed

from weft.describe.cluster_tables import to_toml
from weft.errors import InputError, RunError
from weft.lab.inside import lab_cluster, require_lab_devices
from weft.lab.place import VARIABLE, LabPlaces, Place, current_lab, enter_rank
from weft.run.launch.workers import launch_workers


def places(folder: Path) -> LabPlaces:
    rank = Place(str(folder / "namespace"), str(folder / "gone" / "cgroup.procs"), (0,))
    return LabPlaces(str(folder), "10.213.0.254", "weft0", (rank, rank), to_toml(mixed()), "/lab/mixed.toml")


def test_the_variable_holds_all_of_it(tmp_path: Path) -> None:
    lab = places(tmp_path)
    assert current_lab({VARIABLE: lab.to_text()}) == lab
    assert current_lab({}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ranks": [{}]}', '{"ranks": [], "other": 1}'])
def test_a_variable_of_someone_elses_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="WEFT_LAB: was not set by weft lab"):
        current_lab({VARIABLE: text})


def test_more_ranks_than_devices_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, places(tmp_path).to_text())
    with pytest.raises(InputError, match=r"lab: 3 ranks, but the lab has 2 devices \(nearest valid: 2\)"):
        launch_workers(tmp_path, 3, "launched")
    monkeypatch.setenv(VARIABLE, places(tmp_path / "gone").to_text())
    with pytest.raises(InputError, match="lab: it has ended; start this command with weft lab"):
        launch_workers(tmp_path, 2, "launched")


def test_a_rank_whose_lab_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, places(tmp_path).to_text())
    with pytest.raises(RunError, match=r"rank 1 cannot enter its node of the lab: .*No such file"):
        enter_rank(1)
    monkeypatch.delenv(VARIABLE)
    enter_rank(1)


def test_a_job_for_other_devices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_lab_devices(mixed([1.0]))
    monkeypatch.setenv(VARIABLE, places(tmp_path).to_text())
    assert lab_cluster() == mixed()
    require_lab_devices(mixed(bytes_per_s=1.9e7))
    words = (
        r"'mixed' has other devices than the lab, which emulates 'mixed' \(nearest valid: /lab/mixed.toml\)"
    )
    with pytest.raises(InputError, match=words):
        require_lab_devices(mixed([1.0, 0.5, 0.5]))
