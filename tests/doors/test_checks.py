"""Every rule finds what it is for, in one line with the nearest valid value, and nothing in a good file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from weft.doors.checks import RULES, findings
from weft.doors.checks.base import nearest_divisor
from weft.doors.explain import READERS, read_configuration
from weft.doors.implied import Answers, known_model, with_answers

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
}
AXOLOTL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "datasets": [{"path": "my/data", "type": "alpaca"}],
    "sequence_len": 4096,
    "sample_packing": True,
    "flash_attention": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "none"
"""
MEGATRON = (
    "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --tensor-model-parallel-size 4 "
    "--sequence-parallel "
    "--pipeline-model-parallel-size 4 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --vocab-size 50000 "
)


def merged(record: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The record with what changes, in its tables, too; None takes a key out."""
    result = dict(record)
    for key, value in change.items():
        if isinstance(value, dict):
            value = merged(result.get(key, {}), value)
        result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def deepspeed(**change: Any) -> str:
    return json.dumps(merged(DEEPSPEED, change))


def accelerate(**change: Any) -> str:
    return yaml.safe_dump(merged(ACCELERATE, change))


def axolotl(**change: Any) -> str:
    return yaml.safe_dump(merged(AXOLOTL, change))


def found(text: str, model: str | None = None) -> list[str]:
    told = Answers(model=model)
    return [
        str(one) for one in findings(known_model(with_answers(read_configuration(text, "file"), told), told))
    ]


@pytest.mark.parametrize("text", [deepspeed(), accelerate(), axolotl(), TORCHTITAN, MEGATRON])
def test_nothing_is_found_in_a_good_file(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"fp16": {"enabled": True}},
            "wrong: fp16.enabled: bf16 and fp16 are both enabled; one is allowed (nearest valid: false)",
        ),
        ({"bf16": True}, 'wrong: bf16: True is no table (nearest valid: {"enabled": true})'),
        (
            {"zero_optimization": 3},
            'wrong: zero_optimization: 3 is no table (nearest valid: {"stage": 3})',
        ),
        (
            {"train_batch_size": 66, "train_micro_batch_size_per_gpu": None},
            "wrong: train_batch_size: 66 is no multiple of 1 replica x 4 micro-batches = 4 "
            "(nearest valid: 64)",
        ),
        (
            {"train_batch_size": 60},
            "wrong: train_batch_size: 60 is no multiple of 2 samples x 4 micro-batches = 8 (nearest valid: "
            "64)",
        ),
        (
            {"train_batch_size": None, "train_micro_batch_size_per_gpu": None},
            "wrong: train_batch_size: neither train_batch_size nor train_micro_batch_size_per_gpu is given "
            "(nearest valid: train_micro_batch_size_per_gpu)",
        ),
        (
            {"zero_optimization": {"stage": 4}},
            "wrong: zero_optimization.stage: 4: 0, 1, 2 or 3 (nearest valid: 3)",
        ),
        (
            {"pipeline": {"stages": 4}},
            "wrong: zero_optimization.stage: stage 2 with a pipeline of 4; its engine takes 0 and 1 "
            "(nearest valid: 1)",
        ),
        (
            {"pipeline": {"stages": 8}, "zero_optimization": {"stage": 1}},
            "wasteful: gradient_accumulation_steps: 4 micro-batches cannot fill a pipeline of 8 devices "
            "(nearest valid: 8)",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
            "wrong: zero_optimization.stage: stage 3 with tensor ranks (autotp_size); up to 2 is allowed "
            "(nearest valid: 2)",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "wrong: zero_optimization.offload_param.device: 'cpu' with stage 2; needs at least 3 "
            "(nearest valid: zero_optimization.stage 3)",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "wrong: zero_optimization.cpu_offload: replaced by offload_optimizer "
            '(nearest valid: offload_optimizer: {"device": "cpu"})',
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "wasteful: zero_optimization.offload_optimizer.device: 'nvme': every step moves them over the "
            "host's bus (nearest valid: 'none' where the prediction below fits)",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 10**9}},
            "no effect: zero_optimization.stage3_max_live_parameters: read with stage 3 only; stage is 2 "
            "(nearest valid: zero_optimization.stage 3)",
        ),
        (
            {"zero_optimization": {"overlap_comm": False}},
            "wasteful: zero_optimization.overlap_comm: false: gradients are reduced while nothing is "
            "computed "
            "(nearest valid: true)",
        ),
        (
            {"bf16": {"loss_scale": 0}},
            "no effect: bf16.loss_scale: losses are scaled in fp16 only (nearest valid: leave it out)",
        ),
    ],
)
def test_deepspeed(change: dict[str, Any], line: str) -> None:
    assert line in found(deepspeed(**change))


@pytest.mark.parametrize(("stages", "waits"), [(1, 1), (2, 0)])
def test_untold_reductions_wait_but_where_a_pipeline_reduces_last_anyway(stages: int, waits: int) -> None:
    record = {name: value for name, value in DEEPSPEED.items() if name != "zero_optimization"}
    text = json.dumps(record | {"zero_optimization": {"stage": 1}, "pipeline": {"stages": stages}})
    line = "wasteful: zero_optimization.overlap_comm: not given: gradients are reduced while nothing is "
    assert sum(one.startswith(line) for one in found(text, model="gpt2")) == waits


def test_a_bucket_that_holds_all_gradients_cannot_overlap() -> None:
    text = deepspeed(zero_optimization={"reduce_bucket_size": 500_000_000})
    assert found(text, model="llama-7b") == []
    line = (
        "wasteful: zero_optimization.reduce_bucket_size: 500000000 elements hold all 124 M gradients of a "
        "device; "
        "nothing overlaps (nearest valid: 15554976)"
    )
    assert found(text, model="gpt2") == [line]


def test_tensor_ranks_that_do_not_divide_heads_are_found() -> None:
    text = deepspeed(tensor_parallel={"autotp_size": 5})
    [line] = found(text, model="llama-7b")
    assert line.startswith("wrong: tensor_parallel.autotp_size: tp 5 does not divide 32 heads, ")
    assert line.endswith("(nearest valid: 4)")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"distributed_type": "FDSP"}, "wrong: distributed_type: 'FDSP' is not known (nearest valid: FSDP)"),
        (
            {"mixed_precision": "bfloat16"},
            "wrong: mixed_precision: 'bfloat16' is not known (nearest valid: bf16)",
        ),
        (
            {"fsdp_config": {"fsdp_sharding_strategy": "FULLSHARD"}},
            "wrong: fsdp_config.fsdp_sharding_strategy: 'FULLSHARD' is not known (nearest valid: FULL_SHARD)",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "wrong: gradient_accumulation_steps: no key of the file; Accelerate refuses it",
        ),
        (
            {"num_processes": 15},
            "wrong: num_processes: 15 processes on 2 machines, not as many on each (nearest valid: 16)",
        ),
        (
            {"distributed_type": "NO", "fsdp_config": None},
            "wrong: distributed_type: NO with 16 processes (nearest valid: MULTI_GPU)",
        ),
        (
            {"parallelism_config": {"parallelism_config_dp_shard_size": 4}},
            "wrong: num_processes: 16; dp_replicate 1 x dp_shard 4 x tp 1 x cp 1 x sp 1 = 4 "
            "(nearest valid: 4)",
        ),
        (
            {
                "parallelism_config": {
                    "parallelism_config_tp_size": 4,
                    "parallelism_config_dp_replicate_size": 4,
                }
            },
            "wrong: parallelism_config.parallelism_config_dp_replicate_size: 4 with tp or cp and nothing "
            "shared "
            "out (nearest valid: 1, and parallelism_config.parallelism_config_dp_shard_size 4)",
        ),
        (
            {"deepspeed_config": {"zero_stage": 2}},
            "no effect: deepspeed_config: read with distributed_type DEEPSPEED only; it is FSDP "
            "(nearest valid: DEEPSPEED)",
        ),
        (
            {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
            "no effect: fsdp_config.fsdp_sharding_strategy: FSDP1's; fsdp_version is 2 "
            "(nearest valid: fsdp_config.fsdp_reshard_after_forward)",
        ),
        (
            {"fsdp_config": {"fsdp_use_orig_params": True}},
            "no effect: fsdp_config.fsdp_use_orig_params: FSDP1's; fsdp_version is 2 "
            "(nearest valid: leave it out)",
        ),
        (
            {"fsdp_config": {"fsdp_version": 1}},
            "no effect: fsdp_config.fsdp_reshard_after_forward: FSDP2's; fsdp_version is 1 "
            "(nearest valid: fsdp_config.fsdp_version: 2)",
        ),
        (
            {
                "fsdp_config": {"fsdp_version": 1},
                "parallelism_config": {"parallelism_config_dp_shard_size": 16},
            },
            "wrong: parallelism_config: needs FSDP2; fsdp_version is 1 "
            "(nearest valid: fsdp_config.fsdp_version: 2)",
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "fsdp_config": None,
                "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 2},
            },
            "wrong: deepspeed_config.zero_stage: given beside deepspeed_config_file, which says it "
            "(nearest valid: leave it out)",
        ),
        (
            {"mixed_precision": "no"},
            "wasteful: mixed_precision: no: products in fp32 (nearest valid: bf16, where the devices have "
            "it)",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "fsdp_config": None,
                "megatron_lm_config": {"megatron_lm_pp_degree": 3, "megatron_lm_tp_degree": 2},
            },
            "wrong: num_processes: 16 is no multiple of the 6 devices that pp x tp x cp take (nearest "
            "valid: 18)",
        ),
    ],
)
def test_accelerate(change: dict[str, Any], line: str) -> None:
    assert line in found(accelerate(**change))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"fp16": True}, "wrong: fp16: true beside bf16: true; one is allowed (nearest valid: false)"),
        (
            {"deepspeed": "zero2.json", "fsdp": ["full_shard"]},
            "wrong: deepspeed: given beside fsdp; one is allowed (nearest valid: leave one out)",
        ),
        (
            {"batch_size": 8},
            "wrong: batch_size: given beside gradient_accumulation_steps, which it would decide "
            "(nearest valid: leave it out)",
        ),
        (
            {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True},
            "wrong: load_in_8bit: true beside load_in_4bit: true; one is allowed (nearest valid: false)",
        ),
        (
            {"adapter": "qlora"},
            "wrong: adapter: qlora without load_in_4bit (nearest valid: load_in_4bit: true)",
        ),
        (
            {"adapter": "lora", "load_in_4bit": True},
            "wrong: adapter: lora with load_in_4bit (nearest valid: qlora)",
        ),
        (
            {"load_in_8bit": True},
            "wrong: load_in_8bit: true without an adapter: weights of few bits cannot be trained "
            "(nearest valid: false)",
        ),
        (
            {"lora_r": 16},
            "no effect: lora_r: read with an adapter only; none is given (nearest valid: adapter: lora)",
        ),
        (
            {"flash_attention": False},
            "wrong: sample_packing: true without an attention that masks packed samples "
            "(nearest valid: attn_implementation: flash_attention_2)",
        ),
        (
            {"flash_attention": False, "sdp_attention": True, "context_parallel_size": 2},
            "wrong: context_parallel_size: needs flash attention "
            "(nearest valid: attn_implementation: flash_attention_2)",
        ),
        (
            {"sample_packing": False, "pad_to_sequence_len": True},
            "wasteful: pad_to_sequence_len: true without sample_packing: every sample is padded to "
            "sequence_len "
            "(nearest valid: sample_packing: true)",
        ),
        (
            {"fsdp": ["full_shard"], "tensor_parallel_size": 2},
            "wrong: tensor_parallel_size: needs FSDP2 (nearest valid: fsdp_version: 2)",
        ),
    ],
)
def test_axolotl(change: dict[str, Any], line: str) -> None:
    assert line in found(axolotl(**change))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--fp16", "wrong: --fp16: given with --bf16; one is allowed (nearest valid: --bf16)"),
        (
            "--nnodes 3",
            "wrong: --nproc-per-node: 24 is no multiple of the 16 devices that pp x tp x cp take "
            "(nearest valid: 32)",
        ),
        (
            "--global-batch-size 63",
            "wrong: --global-batch-size: 63 is no multiple of 1 sample x 2 replicas = 2 (nearest valid: 64)",
        ),
        (
            "--global-batch-size 4",
            "wasteful: micro_batches: 2 micro-batches cannot fill a pipeline of 4 devices (nearest valid: 4)",
        ),
        (
            "--num-layers 30",
            "wrong: --pipeline-model-parallel-size: 4 stages do not divide 30 layers "
            "(nearest valid: 3, or --pipeline-model-parallel-layout)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            "wrong: --num-layers-per-virtual-pipeline-stage: 3 does not divide the 8 layers of a device "
            "(nearest valid: 2)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 0",
            "wrong: --num-layers-per-virtual-pipeline-stage: 0 does not divide the 8 layers of a device "
            "(nearest valid: 1)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 4",
            "wrong: --num-virtual-stages-per-pipeline-rank: given with "
            "--num-layers-per-virtual-pipeline-stage; "
            "one is allowed (nearest valid: leave one out)",
        ),
        (
            "--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 2",
            "wrong: --num-layers-per-virtual-pipeline-stage: needs a pipeline; its size is 1 "
            "(nearest valid: --pipeline-model-parallel-size 2)",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--no-overlap-p2p-communication",
            "wrong: --no-overlap-p2p-communication: a looped pipeline of 2 devices without overlapped "
            "messages "
            "(nearest valid: leave it out)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 60",
            "wrong: --global-batch-size: 30 micro-batches in groups of 4 leave 2, fewer than pp 4 "
            "(nearest valid: 64)",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --microbatch-group-size-per-virtual-pipeline-stage 2",
            "wrong: --microbatch-group-size-per-virtual-pipeline-stage: 2: pp 4 to 32 micro-batches "
            "(nearest valid: 4)",
        ),
        (
            "--tensor-model-parallel-size 3",
            "wrong: --tensor-model-parallel-size: tp 3 does not divide 32 heads, 16384 feed-forward columns "
            "(nearest valid: 2)",
        ),
        (
            "--context-parallel-size 3",
            "wrong: --context-parallel-size: 4096 tokens are no multiple of 2 x cp = 6 (nearest valid: 2)",
        ),
        (
            "--pipeline-model-parallel-size 64",
            "wrong: --pipeline-model-parallel-size: 64 stages, the model has 32 blocks (nearest valid: 32)",
        ),
        (
            "--hidden-size 4000 --num-attention-heads 33",
            "wrong: hidden size: 4000 is no multiple of 33 heads (nearest valid: 3993)",
        ),
        (
            "--ddp-bucket-size 9999999999",
            "wasteful: --ddp-bucket-size: 9999999999 elements hold all 417 M gradients of a device; nothing "
            "overlaps (nearest valid: 52076096)",
        ),
        (
            "--recompute-granularity full",
            "wrong: --recompute-granularity: full without --recompute-method "
            "(nearest valid: --recompute-method uniform)",
        ),
        (
            "--recompute-granularity selective --recompute-method block",
            "wrong: --recompute-method: block with granularity selective (nearest valid: leave it out)",
        ),
        (
            "--recompute-method block",
            "no effect: --recompute-method: block without --recompute-granularity "
            "(nearest valid: --recompute-granularity full)",
        ),
        (
            "--distribute-saved-activations",
            "wrong: --distribute-saved-activations: given with --sequence-parallel, which divides them "
            "already "
            "(nearest valid: leave it out)",
        ),
        (
            "--tensor-model-parallel-size 1",
            "no effect: --sequence-parallel: divides over tensor ranks; there is 1 (nearest valid: leave "
            "it out)",
        ),
        (
            "--num-query-groups 8",
            "no effect: --num-query-groups: read with --group-query-attention only "
            "(nearest valid: --group-query-attention)",
        ),
        (
            "--use-megatron-fsdp",
            "no effect: --use-megatron-fsdp: shares nothing without a strategy "
            "(nearest valid: --data-parallel-sharding-strategy optim_grads_params)",
        ),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "wrong: --ckpt-format: Megatron FSDP saves fsdp_dtensor only "
            "(nearest valid: --ckpt-format fsdp_dtensor)",
        ),
    ],
)
def test_megatron(given: str, line: str) -> None:
    assert line in found(MEGATRON + given)


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        (
            "--overlap-grad-reduce",
            "wrong: --overlap-param-gather: needs --overlap-grad-reduce (nearest valid: "
            "--overlap-grad-reduce)",
        ),
        (
            "--overlap-grad-reduce",
            "wasteful: --overlap-grad-reduce: not given: 2 replicas reduce gradients while nothing is "
            "computed "
            "(nearest valid: --overlap-grad-reduce)",
        ),
        (
            "--use-distributed-optimizer",
            "wrong: --overlap-param-gather: needs states that are shared out "
            "(nearest valid: --use-distributed-optimizer)",
        ),
        (
            "--sequence-parallel",
            "wasteful: --sequence-parallel: not given: each of 4 tensor ranks keeps all tokens of norms and "
            "residuals (nearest valid: --sequence-parallel)",
        ),
    ],
)
def test_megatron_without_an_option(left_out: str, line: str) -> None:
    assert line in found(MEGATRON.replace(left_out, ""))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "local_batch_size = 8",
            "local_batch_size = 9",
            "wrong: training.local_batch_size: 9 is no multiple of micro-batches of 2 samples "
            "(nearest valid: 8)",
        ),
        (
            "pipeline_parallel_degree = 4",
            "pipeline_parallel_degree = 1",
            "no effect: parallelism.pipeline_parallel_schedule: read with a pipeline only; its degree is 1 "
            "(nearest valid: leave it out)",
        ),
        (
            "Interleaved1F1B",
            "Zigzag",
            "wrong: parallelism.pipeline_parallel_schedule: 'Zigzag' is not a schedule "
            "(nearest valid: Interleaved1F1B)",
        ),
        (
            'mode = "none"',
            'mode = "selctive"',
            "wrong: activation_checkpoint.mode: 'selctive': none, selective, full, memory_budget "
            "(nearest valid: selective)",
        ),
        (
            "[parallelism]",
            '[optimizer]\nname = "adamw"\n[parallelism]',
            "wrong: optimizer.name: 'adamw': capitals count (nearest valid: AdamW)",
        ),
        (
            "[activation",
            "pipeline_parallel_layers_per_stage = 5\n[activation",
            "wrong: parallelism.pipeline_parallel_layers_per_stage: makes 7 stages, which 4 devices do not "
            "divide (nearest valid: leave it out)",
        ),
        (
            "[activation",
            f"module_fqns_per_model_part = {json.dumps([['layers.0']] * 4)}\n[activation",
            "wrong: parallelism.pipeline_parallel_schedule: interleaved1f1b runs several stages per "
            "device, 1 is "
            "listed (nearest valid: 1F1B)",
        ),
        (
            '"Interleaved1F1B"\n',
            f'"1F1B"\nmodule_fqns_per_model_part = {json.dumps([["layers.0"]] * 8)}\n',
            "wrong: parallelism.pipeline_parallel_schedule: 1f1b runs one stage per device, 2 are listed "
            "(nearest valid: Interleaved1F1B)",
        ),
        (
            '"Interleaved1F1B"\n',
            f'"ZBVZeroBubble"\nmodule_fqns_per_model_part = {json.dumps([["layers.0"]] * 12)}\n',
            "wrong: parallelism.pipeline_parallel_schedule: zbvzerobubble runs two stages per device, 3 are "
            "listed (nearest valid: Interleaved1F1B)",
        ),
        (
            "seq_len = 8192",
            "seq_len = 8190",
            "wrong: training.seq_len: 8190 tokens are no multiple of tp x 2 cp = 4 (nearest valid: 8192)",
        ),
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degree = 1\nenable_async_tensor_parallel = true",
            "no effect: parallelism.enable_async_tensor_parallel: made by the compiler, which is off "
            "(nearest valid: compile)",
        ),
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degree = 1\nenable_async_tensor_parallel = true",
            "no effect: parallelism.enable_async_tensor_parallel: overlaps tensor ranks; there is 1 "
            "(nearest valid: leave it out)",
        ),
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degree = -1",
            "wrong: parallelism.tensor_parallel_degree: -1; only data_parallel_shard_degree can be what is "
            "left "
            "over (nearest valid: 1)",
        ),
        (
            "data_parallel_shard_degree = -1",
            "data_parallel_replicate_degree = -1",
            "wrong: parallelism.data_parallel_replicate_degree: -1; only data_parallel_shard_degree can be "
            "what "
            "is left over (nearest valid: 1)",
        ),
    ],
)
def test_torchtitan(old: str, new: str, line: str) -> None:
    text = TORCHTITAN.replace("[training]", "[training]\n# samples").replace(old, new)
    if "no multiple of micro-batches" in line:
        text = text.replace("[activation", "pipeline_parallel_microbatch_size = 2\n[activation")
    assert line in found(text)


def test_torchtitan_gathers_weights_for_every_accumulated_micro_batch() -> None:
    text = """
[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
"""
    line = (
        "wasteful: training.local_batch_size: 8 micro-batches of 1: weights are gathered twice for each of "
        "them "
        "(nearest valid: 2, where it fits)"
    )
    assert found(text) == [line]


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        (deepspeed(train_batch_sizes=64, train_batch_size=None), "train_batch_sizes", "train_batch_size"),
        (deepspeed(fp16={"enable": False}), "fp16.enable", "fp16.enabled"),
        (axolotl(micro_batchsize=4, micro_batch_size=None), "micro_batchsize", "micro_batch_size"),
        (axolotl(gradient_checkpoint=True), "gradient_checkpoint", "gradient_checkpointing"),
        (accelerate(mixed_precison="bf16", mixed_precision=None), "mixed_precison", "mixed_precision"),
        (
            TORCHTITAN.replace("tensor_parallel_degree", "tensor_paralel_degree"),
            "parallelism.tensor_paralel_degree",
            "parallelism.tensor_parallel_degree",
        ),
        (MEGATRON.replace("-length", "-lengths"), "--seq-lengths", "--seq-length"),
    ],
)
def test_a_misspelt_key_is_found(text: str, key: str, near: str) -> None:
    stack = read_configuration(text, "file").stack
    assert f"wrong: {key}: no key of {stack} (nearest valid: {near})" in found(text)


def test_keys_of_one_letter_more_are_other_keys() -> None:
    assert not any(
        "no key" in line for line in found(accelerate(parallelism_config={"parallelism_config_sp_size": 2}))
    )
    assert not any("no key" in line for line in found(deepspeed(bfloat16={"enabled": True})))


def test_where_devices_are_known_the_batch_is_a_product_of_three() -> None:
    configuration = replace(read_configuration(deepspeed(), "file"), devices=16)
    line = (
        "wrong: train_batch_size: 64; train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 4 x 16 "
        "replicas make 128 (nearest valid: 128)"
    )
    assert [str(one) for one in findings(configuration)] == [line]


def test_every_reader_has_rules() -> None:
    assert set(RULES) == set(READERS)


@pytest.mark.parametrize("of", [1, 7, 12, 30, 96])
def test_the_nearest_divisor_is_one_and_none_is_nearer(of: int) -> None:
    for value in range(1, of + 5):
        near = nearest_divisor(value, of)
        divisors = [one for one in range(1, of + 1) if of % one == 0]
        assert near in divisors
        assert abs(near - value) == min(abs(one - value) for one in divisors)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"compression_training": {"weight_quantization": {}}}, "compression_training"),
        ({"sparse_gradients": False}, "sparse_gradients"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "zero_optimization.mics_shard_size"),
    ],
)
def test_what_deepspeed_has_removed_is_wrong(change: dict[str, Any], where: str) -> None:
    line = f"wrong: {where}: removed; DeepSpeed 0.19.8 and later refuse it (nearest valid: leave it out)"
    assert line in found(deepspeed(**change))


def test_accelerates_megatron_plugin_has_defaults_that_cost() -> None:
    section = {"megatron_lm_tp_degree": 2}
    text = accelerate(distributed_type="MEGATRON_LM", fsdp_config=None, megatron_lm_config=section)
    lines = found(text)
    for key in ("context_parallel_size", "recompute_granularity"):
        start = f"wasteful: megatron_lm_config.megatron_lm_{key}: not given; Accelerate 1.13 and later then "
        assert any(line.startswith(start) for line in lines), lines


@pytest.mark.parametrize("backend", ["flash_attention_2", "sdpa", "flex_attention", "xformers"])
def test_axolotls_attention_is_named_by_one_key(backend: str) -> None:
    text = axolotl(flash_attention=None, attn_implementation=backend)
    assert not any("sample_packing" in line for line in found(text))


def test_a_part_of_a_command_line_may_leave_the_pipeline_to_another() -> None:
    part = 'EXTRA="--num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer "'
    assert not any(line.startswith("wrong") for line in found(part))
    whole = f"{part} --num-attention-heads 8"
    assert any("needs a pipeline; its size is 1" in line for line in found(whole))
