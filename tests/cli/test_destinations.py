"""Paths that cannot be written are refused in one line before any work, by every option that writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli.main import app, run

# Paths that commands read. Every other path of a command is written, and must be checked.
READ = {
    "check FILES",
    "compare FIRST",
    "compare SECOND",
    "corrections RUNS",
    "eval DIRECTORY",
    "explain FILE",
    "export RUN",
    "import SOURCE",
    "init --nodes",
    "init --ports",
    "init --topology",
    "init PATH",
    "measure --nodes",
    "plan --from",
    "runs FOLDER",
    "schedule --stage-times",
    "score --profile",
    "score --trace",
    "score FILE",
    "train --directory",
    "watch PATH",
}
# Paths in folders, tested below by themselves: what is written there depends on the other arguments.
WRITTEN_FOLDERS = {"eval DIRECTORY", "init PATH", "train --directory", "train --resume", "train SOURCE"}
# Texts for commands, as they may also be URLs.
PATHS_OR_URLS = {"train --resume", "train SOURCE"}
NO_SUCH = "no-such-source"
# What a command needs beside the tested option. Nothing of it exists, so whoever reads it fails otherwise.
WORDS = {
    "capture": [NO_SUCH],
    "plan": [NO_SUCH],
    "show": [NO_SUCH],
    "simulate": [NO_SUCH],
    "schedule": [NO_SUCH],
    "score": [NO_SUCH],
    "explain": [NO_SUCH],
    "corrections": [NO_SUCH],
    "export": [NO_SUCH],
    "import": [NO_SUCH, "--model", NO_SUCH],
}


def paths_of_commands() -> Iterator[tuple[str, bool]]:
    """Yield each path of each command, and whether it is checked while the command line is read."""
    for name in app.resolved_commands():
        if name.startswith("-"):
            continue
        for argument in app[name].assemble_argument_collection():
            if "Path" in str(argument.hint):
                yield f"{name} {argument.name}", bool(argument.parameter.validator)


CHECKED = sorted(name for name, checked in paths_of_commands() if checked)


def bad_paths(folder: Path) -> dict[Path, str]:
    """Return paths that nobody can write, with the words of their refusals."""
    file = folder / "file"
    file.write_text("text")
    bad = {
        file / "below": f"{file} is a file, not a folder",
        folder / "missing" / "name": f"the folder {folder / 'missing'} does not exist",
        Path("/proc/name"): "nothing can be written in the folder /proc",
    }
    closed = folder / "closed"
    closed.mkdir(mode=0o500)
    if not os.access(closed, os.W_OK):
        bad[closed / "name"] = f"nothing can be written in the folder {closed}"
    return bad


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 2
    written, told = capsys.readouterr()
    assert written == ""
    (line,) = told.splitlines()
    return line


def test_every_path_of_every_command_is_read_or_checked() -> None:
    assert {name for name, checked in paths_of_commands() if not checked} == READ
    assert WRITTEN_FOLDERS < READ | PATHS_OR_URLS


@pytest.mark.parametrize("option", CHECKED)
def test_a_path_that_cannot_be_written_is_refused_before_any_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name = option.split()
    words = [command, *WORDS[command], *([name] if name.startswith("--") else [])]
    for path, reason in bad_paths(tmp_path).items():
        assert refused(capsys, *words, str(path)).startswith(f"weft: {path}: {reason}")
    line = refused(capsys, *words, str(tmp_path))
    assert line.removeprefix(f"weft: {tmp_path}: ") in {
        "is a folder; name a file",
        "exists already; give another path",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "file"]


def test_a_file_that_is_never_overwritten_is_refused_likewise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, reason in bad_paths(tmp_path).items():
        for words in (["init", str(path)], ["init", str(path), "--cluster"]):
            assert refused(capsys, *words).startswith(f"weft: {path}: {reason}")
    assert refused(capsys, "init", str(tmp_path / "file")).endswith("exists already; give another path")


def test_a_run_directory_that_cannot_be_written_is_refused_before_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "run.toml"
    broken.write_text("no table")
    file = tmp_path / "file"
    file.write_text("text")
    below, none = file / "below", f"{file} is a file, not a folder"
    for option, path, reason in (
        ("--directory", file, none),
        ("--directory", below, none),
        ("--resume", file, "a file, not a run directory"),
        ("--resume", below, "not a run directory: it has no run.toml"),
    ):
        assert refused(capsys, "train", str(broken), option, str(path)) == f"weft: {path}: {reason}"
    (tmp_path / "runs").write_text("not a folder")
    monkeypatch.chdir(tmp_path)
    assert "runs is a file, not a folder" in refused(capsys, "train", str(broken))


def test_measurements_that_cannot_be_kept_are_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("weft.cli.machines.measure_machine", None)
    assert refused(capsys, "measure").endswith("file is a file, not a folder")


def test_pictures_are_svg_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.png"
    line = f"weft: {path}: pictures are SVG (nearest valid: {tmp_path / 'x.svg'})"
    assert refused(capsys, "schedule", "gpipe", "--svg", str(path)) == line
    assert not path.exists()


@pytest.mark.parametrize("option", ["--output", "--report"])
def test_a_scored_file_is_not_overwritten(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.csv"
    file.write_text("family,layers\n")
    again = tmp_path / "." / ".." / tmp_path.name / "m.csv"
    line = f"weft: {again}: the scored file itself; give another path"
    assert refused(capsys, "score", str(file), option, str(again)) == line
    assert file.read_text() == "family,layers\n"


def test_links_stay_links_and_pipes_take_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    for path in (link, Path("/dev/null")):
        assert run(["schedule", "gpipe", "--svg", str(path)]) == 0
        assert capsys.readouterr().out.endswith(f"wrote {path}\n")
    assert link.is_symlink()
    assert target.read_text().startswith("<svg")
    assert Path("/dev/null").is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_output_to_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "weft", "schema", "run"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "weft: output: No space left on device\n")
