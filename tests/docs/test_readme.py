"""Commands of the README's table run literally."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from hugging_face_jobs import model_folder, small, whole_model
from installing import ROOT
from pool import WorkerPool
from pooled_runs import trained
from safetensors.torch import save_file

from docs.walkthrough import FENCED, answer
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.lab.lab import require_system

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("| question | command |\n")[2].partition("\n\n")[0]
WORDS = re.findall(r"`([^`]+)`", TABLE)
COMMANDS = [word for word in WORDS if word.split()[0] in ("weft", "python", "sudo")]
# Keys of a run file.
KEYS = [word for word in WORDS if word not in COMMANDS and " = " in word]


MEASURE, LINKS, WATCH = "weft measure gpt-1m", "weft measure --nodes cluster.toml", "weft watch"
LAB = 'sudo env "PATH=$PATH" weft lab cluster.toml -- weft train run.toml --on cluster.toml'
# `make examples` runs these: they measure for a minute, or need a launcher, a signal or root.
SLOW = (MEASURE, LINKS, WATCH, LAB)
# The reports of `weft measure --nodes`, which every node runs, come from a launcher's ranks.
LAUNCHER = "torchrun --standalone --nproc-per-node 2 --no-python"
BEFORE = (
    "weft plan run.toml --out plan.json",
    "weft plan run.toml --pp 2 --dp 1 --out other.json",
    "weft capture mymodule:build -o graph.json",
)
MODULE = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 4)
"""
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
        patch.syspath_prepend(str(folder))
        (folder / "examples").symlink_to(ROOT / "examples")
        page = (ROOT / "docs" / "coming-from" / "deepspeed.md").read_text(encoding="utf-8")
        (file,) = (block[3] for block in FENCED.finditer(page) if block[2] == "ds_config.json")
        (folder / "ds_config.json").write_text(file)
        (folder / "mymodule.py").write_text(MODULE)
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
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SLOW])
def test_a_command_runs_literally(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEFT_HOME", str(folder / "home"))
    code, printed = answer(command)
    assert code == 0, printed
    assert printed


def test_the_slow_commands_are_in_the_table() -> None:
    assert set(SLOW) < set(COMMANDS)


@pytest.mark.examples
@pytest.mark.parametrize("command", SLOW)
def test_a_slow_command_runs_literally(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WEFT_HOME", str(folder / "home"))
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if not Path("cluster.toml").exists():
        assert answer("weft init cluster.toml --cluster")[0] == 0
    if command == LAB:
        try:
            require_system()
        except InputError as error:
            pytest.skip(str(error.violations[0]))
        # Root needs no sudo, and may have none.
        command = command if shutil.which("sudo") else command.removeprefix("sudo ")
    if command == LINKS:
        command = f"{LAUNCHER} {command}"
    with subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if command == WATCH:
            address = process.stdout.readline().removeprefix("watch: ").strip()
            with build_opener(HTTPCookieProcessor()).open(address) as page:
                assert b"Runs in runs" in page.read()
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=300.0)
    assert process.returncode == 0


@pytest.mark.parametrize("words", KEYS)
def test_a_run_file_takes_the_keys(words: str) -> None:
    table, bracket, keys = words.partition("] ")
    run = tomllib.loads(f"{table}]\n{keys}" if bracket else words)
    assert parse_run({"model": {"preset": "gpt-1m"}} | run)
