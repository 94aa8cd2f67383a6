"""Megatron-LM: the script is run by bash up to torchrun, whose words Megatron-LM's own parser and validation
get, on a rank of as many as the plan has.

There is no device here: an A100 is claimed where validation asks for its kind (`ARCHITECTURE`). Python before
3.12 lacks `typing.override`, which is put in its place.
"""

from __future__ import annotations

import os
import sys
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typing_extensions
from answering import answer
from launched import program_of, ranks_started, started

warnings.simplefilter("ignore")
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

import megatron.core  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.training import arguments  # noqa: E402

# The compute capability of an A100.
ARCHITECTURE = 8


def check(file: Path, case: Mapping[str, Any]) -> None:
    script = file.read_text()
    ranks = ranks_started(script)
    if ranks != case["ranks"]:
        raise ValueError(f"torchrun starts {ranks} ranks, the plan has {case['ranks']}")
    words = started(script, "torchrun", {"NODE_RANK": "0", "MASTER_ADDR": "localhost"})
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks))
    if "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *program_of(words, "pretrain_gpt.py")]
    arguments.get_device_arch_version = lambda: ARCHITECTURE
    read = arguments.parse_args()
    arguments.validate_args(read)
    # Fused kernels come with Transformer Engine, which needs a device.
    read.apply_rope_fusion = False
    configuration = arguments.core_transformer_config_from_args(read, TransformerConfig)
    count = read.global_batch_size // (read.micro_batch_size * read.data_parallel_size)
    group = configuration.microbatch_group_size_per_vp_stage
    if (
        configuration.virtual_pipeline_model_parallel_size
        and 0 < count % group < read.pipeline_model_parallel_size
    ):
        raise ValueError(f"{count} micro-batches in groups of {group}: refused when the schedule starts")


if __name__ == "__main__":
    answer(f"megatron-core {megatron.core.__version__}", check)
