"""Help fits one screen and names every option; `--help-all` and the reference explain all of them."""

from __future__ import annotations

import re

import pytest

from weft.cli.main import app, run

LINES = 30
COLUMNS = 80
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@pytest.fixture(autouse=True)
def _narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 0
    return capsys.readouterr().out


def explained(text: str) -> set[str]:
    """The options with a line of their own, in a frame where all are explained."""
    return set(re.findall(r"^(?:│ +)?(--[a-z][a-z-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["", *(name for name in app if not name.startswith("-"))])
def test_help_fits_a_screen_and_names_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [name] if name else []
    short, full = shown(capsys, *words, "--help"), shown(capsys, *words, "--help-all")
    assert len(short.splitlines()) <= LINES
    assert max(map(len, short.splitlines())) <= COLUMNS
    assert explained(full) <= set(OPTION.findall(short))
    if name:
        reference = app.generate_docs(output_format="markdown")
        section = reference.split(f"\n## weft {name}\n")[1].split("\n## weft ")[0]
        assert explained(full) <= set(OPTION.findall(section))


def test_few_options_of_plan_are_explained_where_nobody_asks_for_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, full = shown(capsys, "plan", "--help"), shown(capsys, "plan", "--help-all")
    assert {"--on", "--what-if", "--out"} <= explained(short)
    assert "--pp" in explained(full) - explained(short)
    assert "Pins of the layout (--help-all): --schedule, " in short


def test_short_help_has_first_sentences_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    short = shown(capsys, "schedule", "--help")
    assert re.search(r"^--loops INT +Stages per device *$", short, re.MULTILINE)
    assert re.search(r"^--ranks INT +Pipeline devices \[4\] *$", short, re.MULTILINE)
    adapter = shown(capsys, "export", "--help")
    assert "low-rank products of [lora] alone" in " ".join(adapter.split())


def test_a_command_that_the_lab_runs_keeps_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "no-such.toml", "--", "weft", "--help-all"]) == 2
    assert "Usage" not in capsys.readouterr().out
