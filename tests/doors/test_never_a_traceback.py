"""Whatever a file says, the answer is an explanation or a refusal, never a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doors.files import written
from hypothesis import given
from hypothesis import strategies as st

from weft.doors.explain import READERS
from weft.doors.explained import explain_text
from weft.doors.implied import Answers
from weft.doors.trace.analysis import analyse
from weft.doors.trace.events import read_trace
from weft.errors import InputError

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(
        ["", "auto", "cpu", "full", "none", "bf16", "1", "1e9", "$TP", "gpt2", "os:system", "nan"]
    ),
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
)
# Mostly what fits its key, so that more than the reading is reached.
LIKELY = st.one_of(*[st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 70), st.booleans()] * 6, VALUES)
KEYS = {
    "DeepSpeed": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.mics_shard_size",
        "zero_optimization.offload_param.device",
        "pipeline.stages",
        "pipeline.activation_checkpoint_interval",
        "tensor_parallel.autotp_size",
        "sequence_parallel_size",
        "bf16.enabled",
        "fp16.enabled",
        "gradient_clipping",
    ),
    "Accelerate": (
        "distributed_type",
        "num_processes",
        "num_machines",
        "mixed_precision",
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_sharding_strategy",
        "fsdp_config.fsdp_reshard_after_forward",
        "parallelism_config.parallelism_config_tp_size",
        "parallelism_config.parallelism_config_dp_replicate_size",
        "parallelism_config.parallelism_config_dp_shard_size",
        "megatron_lm_config.megatron_lm_pp_degree",
        "deepspeed_config.zero_stage",
    ),
    "Axolotl": (
        "base_model",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "sequence_len",
        "bf16",
        "fp16",
        "deepspeed",
        "fsdp",
        "fsdp_config.reshard_after_forward",
        "dp_shard_size",
        "context_parallel_size",
        "gradient_checkpointing",
        "adapter",
        "sample_packing",
    ),
    "torchtitan": (
        "model.name",
        "model.flavor",
        "training.local_batch_size",
        "training.global_batch_size",
        "training.seq_len",
        "training.mixed_precision_param",
        "parallelism.pipeline_parallel_degree",
        "parallelism.pipeline_parallel_schedule",
        "parallelism.pipeline_parallel_microbatch_size",
        "parallelism.module_fqns_per_model_part",
        "parallelism.tensor_parallel_degree",
        "parallelism.data_parallel_shard_degree",
        "activation_checkpoint.mode",
    ),
    "Megatron-LM": (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--num-query-groups",
        "--seq-length",
        "--micro-batch-size",
        "--global-batch-size",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-layout",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--num-distributed-optimizer-instances",
        "--nproc-per-node",
        "--nnodes",
        "--ddp-bucket-size",
        "--recompute-granularity",
        "--use-distributed-optimizer",
        "--group-query-attention",
        "--swiglu",
        "--bf16",
        "--fp16",
    ),
}


@pytest.mark.parametrize("stack", KEYS)
@given(data=st.data())
def test_configurations(stack: str, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(KEYS[stack]), unique=True))
    flat = {key: data.draw(LIKELY) for key in chosen}
    told = Answers(on="8xa100-80gb", model=data.draw(st.sampled_from([None, "gpt2"])))
    try:
        found = explain_text(written(stack, flat), "file", told, search=False)
    except InputError:
        return
    json.dumps(found.record())


def as_module(flat: dict[str, Any]) -> str:
    """A module of Python that says it to torchtitan."""
    tables: dict[str, list[str]] = {"training": [], "parallelism": [], "model": []}
    for key, value in flat.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, []).append(f"{name}={value!r}")
    calls = ", ".join(f"{table}=Table({', '.join(words)})" for table, words in tables.items())
    return f"def one():\n    return Trainer.Config({calls})\n"


@given(data=st.data())
def test_configurations_in_python(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(KEYS["torchtitan"]), unique=True))
    text = as_module({key: data.draw(LIKELY) for key in chosen})
    assert READERS["torchtitan"].recognises(text, "file")
    told = Answers(on="8xa100-80gb", model="gpt2")
    try:
        found = explain_text(text, "file", told, search=False)
    except InputError:
        return
    json.dumps(found.record())


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "ph": st.sampled_from(["X", "X", "X", "M", 3]),
                "name": st.one_of(*[st.sampled_from(["ProfilerStep#1", "gemm", "thread_name"])] * 6, SCALARS),
                "ts": LIKELY,
                "dur": LIKELY,
            },
            optional={
                "cat": st.sampled_from(["kernel", "cpu_op", "gpu_memcpy", "forward", None, 3]),
                "pid": SCALARS,
                "tid": SCALARS,
                "args": VALUES,
            },
        ),
        max_size=6,
    ),
    VALUES,
)
def test_traces(events: list[dict[str, Any]], info: Any) -> None:
    record = {"traceEvents": events, "distributedInfo": info, "deviceProperties": info}
    try:
        found = analyse(read_trace(json.dumps(record).encode(), "trace"))
    except InputError:
        return
    json.dumps(found.record())
