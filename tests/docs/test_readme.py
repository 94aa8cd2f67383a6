"""Commands of the README's table run literally, or a named test runs what they do."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hugging_face_jobs import model_folder, small, whole_model
from installing import ROOT
from pool import WorkerPool
from pooled_runs import trained
from safetensors.torch import save_file

from docs.walkthrough import FENCED, answer
from weft.describe.run_file import parse_run

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("| question | command |\n")[2].partition("\n\n")[0]
WORDS = re.findall(r"`([^`]+)`", TABLE)
COMMANDS = [word for word in WORDS if word.split()[0] in ("weft", "python", "sudo")]
# Keys of a run file.
KEYS = [word for word in WORDS if word not in COMMANDS and " = " in word]


class Elsewhere(NamedTuple):
    """The reason why a command is not run here, and the test of what it does."""

    reason: str
    test: str


ELSEWHERE: Mapping[str, Elsewhere] = {
    "weft measure gpt-1m": Elsewhere(
        "measures for a minute of a core",
        "tests/capture/test_capture.py::test_a_profile_covers_every_kind_and_its_memory_is_the_predicted_one",
    ),
    "weft measure --nodes cluster.toml": Elsewhere(
        "needs a launcher that starts it on every node",
        "tests/capture/test_nodes.py::test_the_command_keeps_the_links_in_a_file_for_plans",
    ),
    "python benchmarks/peers.py gpt2 --on 16xa100-80gb --compare weft,uniform --calculon calculon": Elsewhere(
        "needs a clone of Calculon",
        "tests/benchmarks/test_peers.py::test_one_script_takes_a_question_and_one_leaves_out_what_is_not_named",
    ),
    "weft watch": Elsewhere(
        "serves a page on a port of its own until it is stopped",
        "tests/watch/test_server.py::test_the_command_prints_its_address_and_ends_on_a_signal",
    ),
    'sudo env "PATH=$PATH" weft lab cluster.toml -- weft train run.toml --on cluster.toml': Elsewhere(
        "needs root", "tests/lab/test_lab.py::test_ranks_meet_on_their_nodes"
    ),
}
BEFORE = ("weft plan run.toml --out plan.json", "weft plan run.toml --pp 2 --dp 1 --out other.json")
# A small job, so that its runs take few steps.
RUN = """
[model]
{model}
[task]
data = "text.txt"
sequence = 32
[train]
global_batch = 4
steps = 8
precision = "fp32"
{plan}
"""
# The run that the table names has adapters, which one of its rows exports.
ADAPTED = RUN.format(model='hf = "base"\nweights = true', plan="[plan]\npp = 1\ndp = 2\n[lora]\nrank = 4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_pool: WorkerPool) -> Path:
    """A folder with the files that the table names, as a user would have made them."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WEFT_HOME", str(folder / "home"))
        (folder / "examples").symlink_to(ROOT / "examples")
        page = (ROOT / "docs" / "coming-from" / "deepspeed.md").read_text(encoding="utf-8")
        (file,) = (block[3] for block in FENCED.finditer(page) if block[2] == "ds_config.json")
        (folder / "ds_config.json").write_text(file)
        (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
        (folder / "run.toml").write_text(RUN.format(model='preset = "gpt-1m"', plan=""))
        base = small("llama")
        model_folder(folder / "base", base)
        weights = {name: one.contiguous() for name, one in whole_model(base).state_dict().items()}
        save_file(weights, folder / "base" / "model.safetensors")
        (folder / "adapted.toml").write_text(ADAPTED)
        for command in BEFORE:
            assert answer(command)[0] == 0
        trained(worker_pool, folder / "adapted.toml", directory=folder / "runs" / "run")
    return folder


@pytest.mark.examples
@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ELSEWHERE])
def test_a_command_runs_literally(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEFT_HOME", str(folder / "home"))
    code, printed = answer(command)
    assert code == 0, printed
    assert printed


@pytest.mark.parametrize("command", ELSEWHERE)
def test_other_commands_are_in_the_table_and_their_tests_exist(command: str) -> None:
    assert command in COMMANDS
    file, _, name = ELSEWHERE[command].test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("words", KEYS)
def test_a_run_file_takes_the_keys(words: str) -> None:
    table, bracket, keys = words.partition("] ")
    run = tomllib.loads(f"{table}]\n{keys}" if bracket else words)
    assert parse_run({"model": {"preset": "gpt-1m"}} | run)
