"""Where measurements are kept."""

from pathlib import Path

import pytest

from weft.files import weft_home


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WEFT_HOME": "/given"}, "/given"),
        ({"WEFT_HOME": "~/given"}, "/home/someone/given"),
        ({"XDG_CONFIG_HOME": "/configuration"}, "/configuration/weft"),
        ({"XDG_CONFIG_HOME": "relative"}, "/home/someone/.config/weft"),
        ({"WEFT_HOME": "", "XDG_CONFIG_HOME": ""}, "/home/someone/.config/weft"),
        ({}, "/home/someone/.config/weft"),
    ],
)
def test_home_follows_the_environment(monkeypatch, variables, expected):
    for name in ("WEFT_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert weft_home() == Path(expected)
