"""Accelerate: `accelerate launch` up to where it would start processes, and the plugins that each would make.

The launch line is parsed and validated with the file, the environment of a process is made of it, and the
plugins read that environment as `Accelerator` has them do. DeepSpeed's plugin needs DeepSpeed beside it. A
plan for processors is launched, and trains a tiny model.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import yaml
from accelerate.commands import launch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, MegatronLMPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from answering import answer

_TIME_LIMIT_S = 120
# What the user of several machines sets.
_PLACE = {"$NODE_RANK": "0", "$MASTER_ADDR": "127.0.0.1"}


def check(file: Path, case: Mapping[str, Any]) -> None:
    words = [_PLACE.get(word, word) for word in shlex.split(case["launch"])]
    words = [str(file) if word == case["written"] else word for word in words]
    words = words[words.index("launch") + 1 :]
    keys_are_known(yaml.safe_load(file.read_text()), launch.launch_command_parser().parse_args(words))
    arguments = launch.launch_command_parser().parse_args(words)
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    # Machines of several processes listen on a port, which may be in use here.
    arguments.main_process_port = 0
    arguments.mixed_precision = arguments.mixed_precision or "no"
    if arguments.use_deepspeed:
        _, environment = prepare_deepspeed_cmd_env(arguments)
    elif arguments.num_processes == 1:
        _, environment = prepare_simple_launcher_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    os.environ.update({key: str(value) for key, value in environment.items()})
    if arguments.use_deepspeed:
        DeepSpeedPlugin()
    if arguments.use_fsdp:
        FullyShardedDataParallelPlugin().set_mixed_precision(arguments.mixed_precision)
    if arguments.use_megatron_lm:
        MegatronLMPlugin()
    if getattr(arguments, "use_parallelism_config", False):
        sizes = ParallelismConfig()
        if sizes.total_size != case["ranks"]:
            raise ValueError(f"parallelism_config makes {sizes.total_size} processes, not {case['ranks']}")
    if arguments.use_cpu:
        trains(file, words, case)


def keys_are_known(record: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Keys of sections become arguments of the same name; others are thrown away without a word."""
    unknown = [
        key
        for section, keys in record.items()
        if isinstance(keys, dict)
        for key in keys
        if not hasattr(arguments, key)
    ]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: read by nothing")


def trains(file: Path, words: list[str], case: Mapping[str, Any]) -> None:
    """Two steps of a tiny model, by as many processes as the plan has, which must find each other."""
    program = Path(__file__).parent / "train_with_accelerate.py"
    words = [str(program) if word == "train.py" else word for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(_told(case["launch"]))}
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT_S, cwd=file.parent
    )
    found = re.findall(r"(\d+) of (\d+) processes: 2 steps", run.stdout)
    wanted = sorted((str(rank), str(case["ranks"])) for rank in range(case["ranks"]))
    if run.returncode or sorted(found) != wanted:
        raise ValueError(f"processes that trained: {sorted(found)}; {run.stderr[-200:]}")


def _told(line: str) -> list[list[str]]:
    """Variables in front of a launch line."""
    return [word.split("=", 1) for word in line.split("accelerate ")[0].split()]


if __name__ == "__main__":
    answer(accelerate.__version__, check)
