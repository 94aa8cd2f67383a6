"""The pages for users of other stacks: commands run and print what is shown, and rows of tables hold."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from doors.files import written
from installing import ROOT

from docs.counts import STACKS, rows
from docs.walkthrough import follow, renewed
from weft.cli.files import json_schema
from weft.describe.run_file import parse_run
from weft.doors.configuration import flat
from weft.doors.explain import read_configuration

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
# What else a file says, so that its choices mean something.
BESIDE: Mapping[str, dict[str, Any]] = {
    "Megatron-LM": {"--pipeline-model-parallel-size": 4, "--num-layers": 32},
    "torchtitan": {"parallelism.pipeline_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 2},
    "DeepSpeed": {"train_micro_batch_size_per_gpu": 1},
    "Accelerate": {"compute_environment": "LOCAL_MACHINE"},
}
NUMBER = re.compile(r"[\d.,]+(?: ?(?:[numkMGT]?s|[kMGT]?B|%)\b)?")


def choices(page: Path) -> list[tuple[str, str, str]]:
    """Rows of two keys: the stack, its own words and those of weft."""
    found, stack = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [""]
        if len(cells) == 2 and cells[1] == "weft" and not cells[0].endswith(" has"):
            stack = cells[0]
        elif len(cells) == 1:
            stack = ""
        elif stack and not cells[0].startswith("---"):
            found.append((stack, cells[0].strip("`"), cells[1].strip("`")))
    return found


CHOICES = [choice for page in PAGES for choice in choices(page)]
READ = [choice for choice in CHOICES if choice[0] in STACKS]


def without_numbers(text: str) -> str:
    """The text without its figures, whose columns move others."""
    return " ".join(NUMBER.sub("#", text).split())


@pytest.mark.examples
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    steps = [*follow(page.read_text(encoding="utf-8"))]
    assert len(steps) >= 2
    for step in steps:
        assert set(step.exit_codes) == {0}, step.printed
        if step.shown is not None:
            # `make pictures` renews the figures.
            assert without_numbers(step.printed) == without_numbers(step.shown[3])


def test_answers_are_renewed_and_mistakes_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (
        '```toml title="run.toml"\n[model]\npreset = "gpt-1m"\n```\n\n```sh\nweft check run.toml%s\n```\n\n'
    )
    shown = page + "```text\n%s```\n"
    assert renewed(shown % ("", "old\n")) == shown % ("", "run.toml: good\n")
    for mistake in (" --on nowhere", "\nweft nothing", "\nls"):
        with pytest.raises(ValueError, match="weft"):
            renewed(shown % (mistake, ""))


def file_of(stack: str, words: str) -> str:
    """A file of the stack that says these words of its page beside others."""
    if stack == "Megatron-LM":
        return f"{written(stack, BESIDE[stack])} {words}"
    if stack == "torchtitan":
        said = {key: value for key, value in flat(tomllib.loads(words)).items() if value != {}}
    else:
        said = json.loads(f"{{{words}}}") if stack == "DeepSpeed" else yaml.safe_load(f"{{{words}}}")
    return written(stack, BESIDE[stack] | said)


@pytest.mark.parametrize(("stack", "theirs", "ours"), READ)
def test_a_choice_is_read_as_the_page_says(stack: str, theirs: str, ours: str) -> None:
    found = read_configuration(file_of(stack, theirs), "file")
    [table] = tomllib.loads(ours).values()
    [(name, value)] = table.items()
    read = getattr(found.layout if hasattr(found.layout, name) else found, name)
    assert (list(read) if isinstance(read, tuple) else read) == value


@pytest.mark.parametrize("ours", sorted({choice[2] for choice in CHOICES}))
def test_a_run_file_takes_the_words_of_weft(ours: str) -> None:
    assert parse_run({"model": {"preset": "gpt-1m"}} | tomllib.loads(ours))


def test_every_page_has_choices() -> None:
    assert {choice[0] for choice in CHOICES} == {*STACKS, "torch"}


@pytest.mark.parametrize("stack", STACKS)
def test_every_count_has_its_row(stack: str) -> None:
    text = "".join(row[0] for row in rows(stack))
    keys = {key for table in STACKS[stack] for row in {**table.counts, **table.parts}.values() for key in row}
    assert {key for key in keys if f"`{key}`" not in text} == set()


@pytest.mark.parametrize("stack", STACKS)
def test_counts_name_keys_of_a_run_file(stack: str) -> None:
    schema = json_schema("run")
    for table, key in re.findall(r"`(\w+)\.(\w+)`", "".join(row[1] for row in rows(stack))):
        assert key in schema["$defs"][schema["properties"][table]["$ref"].rsplit("/", 1)[1]]["properties"]
