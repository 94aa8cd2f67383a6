"""Finding the controller of both versions, and the files that give a group its quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.errors import InputError, RunError
from weft.lab import cgroups
from weft.lab.cgroups import Controller, find_controller, quota_files


def test_the_first_version_is_found_by_its_mount() -> None:
    mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
    assert find_controller(mounts) == Controller(Path("/sys/fs/cgroup/cpu"), 1)


def test_the_second_version_is_found_where_it_has_the_controller(tmp_path: Path) -> None:
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    (tmp_path / "cgroup.controllers").write_text("cpuset memory\n")
    with pytest.raises(InputError, match="no control groups with processor quotas are mounted here"):
        find_controller(mounts)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    assert find_controller(mounts) == Controller(tmp_path, 2)


def test_a_quota_is_written_as_each_version_reads_it() -> None:
    assert dict(quota_files(1, 0.3)) == {"cpu.cfs_period_us": "5000", "cpu.cfs_quota_us": "1500"}
    assert dict(quota_files(2, 0.3)) == {"cpu.max": "1500 5000"}
    assert dict(quota_files(2, 0.1)) == {"cpu.max": "1000 10000"}


def test_a_group_of_the_second_version_is_given_the_controller_first(tmp_path: Path) -> None:
    path = Controller(tmp_path, 2).make("weft-lab-1", "rank-0", 0.5)
    assert (path / "cpu.max").read_text() == "2500 5000"
    for parent in (tmp_path, tmp_path / "weft-lab-1"):
        assert (parent / "cgroup.subtree_control").read_text() == "+cpu"
    assert Controller(tmp_path, 2).labs() == ["weft-lab-1"]


def test_a_system_that_takes_no_quota_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "weft-lab-1").write_text("")
    with pytest.raises(InputError, match="weft-lab-1/rank-0: no quotas can be set: "):
        Controller(tmp_path, 1).make("weft-lab-1", "rank-0", 0.5)


def test_processes_that_do_not_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "weft-lab-1" / "rank-0"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("77\n")
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(cgroups, "ENDING_S", 0.0)
    with pytest.raises(RunError, match=r"weft-lab-1: processes do not end: \[77\]"):
        Controller(tmp_path, 1).remove("weft-lab-1")
    assert killed == [77]
    Controller(tmp_path, 1).remove("weft-lab-2")
