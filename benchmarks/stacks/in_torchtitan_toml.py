"""torchtitan 0.2: its configuration manager reads the TOML that the launch line names, the meshes of as many
ranks are described, and the flavor is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from answering import answer
from launched import program_of, ranks_started, started
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_args


def check(file: Path, case: Mapping[str, Any]) -> None:
    ranks = ranks_started(case["launch"])
    if ranks != case["ranks"]:
        raise ValueError(f"torchrun starts {ranks} ranks, the plan has {case['ranks']}")
    words = started(case["launch"], "torchrun", {"NODE_RANK": "0", "MASTER_ADDR": "localhost"})
    words = [str(file) if word == case["written"] else word for word in words]
    config = ConfigManager().parse_args(program_of(words, "torchtitan.train"))
    sizes = config.parallelism
    ParallelDims(
        dp_replicate=sizes.data_parallel_replicate_degree,
        dp_shard=sizes.data_parallel_shard_degree,
        cp=sizes.context_parallel_degree,
        tp=sizes.tensor_parallel_degree,
        pp=sizes.pipeline_parallel_degree,
        ep=sizes.expert_parallel_degree,
        etp=sizes.expert_tensor_parallel_degree,
        world_size=ranks,
    )
    if config.model.flavor not in llama3_args:
        raise KeyError(config.model.flavor)


if __name__ == "__main__":
    answer(version("torchtitan"), check)
