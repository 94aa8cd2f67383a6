"""Systems on which no lab can be made are told why, in one line."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from weft.cli.main import run
from weft.errors import InputError
from weft.lab.lab import require_system


def refused() -> str:
    with pytest.raises(InputError) as caught:
        require_system()
    return str(caught.value)


def test_another_system_than_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refused() == "lab: needs Linux, and this is darwin"


def test_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    remedy = 'sudo env "PATH=$PATH" weft lab ...'
    assert refused() == f"lab: needs root to make networks and control groups: {remedy}"


def test_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert refused() == "lab: this system has no tc; install iproute2 and util-linux"


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "2xa100-40gb"]) == 2
    assert capsys.readouterr().err == "weft: lab: no command given: weft lab CLUSTER.toml -- COMMAND\n"
    assert run(["lab", "1xa100-40gb+1xv100-32gb", "--pernode", "--", "echo"]) == 2
    assert capsys.readouterr().err.startswith("weft: lab: --pernode: no such option")
