"""Files of other stacks, as people write them, in weft's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.optimizers import ADAMW, FOREACH_ADAMW
from weft.describe.plan import Buffers
from weft.doors.checks import findings
from weft.doors.configuration import LIKE_WEFT, Configuration, StatedMemory, flat
from weft.doors.explain import read_configuration
from weft.doors.explain.megatron import options_of, stages_of
from weft.doors.explained import explain_text
from weft.doors.implied import Answers, preset_of
from weft.doors.stage_splits import StageSplit
from weft.errors import InputError

# A script that keeps its options in variables and arrays, as most do.
SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8   # of a node
NODES=${NODES:-16}
WORLD=$(($GPUS*$NODES))
TP=8; PP=8
BATCH=$((WORLD / TP / PP * 64))

LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes=$NODES
)
MODEL=(
    --num-layers 64
    --hidden-size 8192   # wide
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size 28672
    --swiglu
    --seq-length 4096
    --untie-embeddings-and-output-weights
)
# --fp16 was too narrow
TRAINING="--micro-batch-size 1 --global-batch-size ${BATCH} --bf16 --use-distributed-optimizer"
torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL[@]} $TRAINING \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP \\
    --num_layers_per_virtual_pipeline_stage 2 \\
    --recompute-activations --clip-grad 0
"""


def fields(configuration: Configuration, *names: str) -> tuple[Any, ...]:
    layout = configuration.layout
    return tuple(getattr(layout if hasattr(layout, name) else configuration, name) for name in names)


def test_a_script_of_megatron_lm() -> None:
    found = read_configuration(SCRIPT, "train.sh")
    assert found.stack == "Megatron-LM"
    axes = ("devices", "pp", "tp", "cp", "replicas", "loops")
    assert fields(found, *axes) == (128, 8, 8, None, 2, 4)
    assert fields(found, "micro_batch_size", "global_batch", "sequence") == (1, 128, 4096)
    kinds = ("sharding", "recompute", "precision", "schedule", "blocking", "clips")
    assert fields(found, *kinds) == (
        "zero-1",
        "selective",
        "bf16",
        "depth-first",
        ("gathers", "reductions"),
        False,
    )
    model = found.model
    assert isinstance(model, ModelConfig)
    assert (model.family, model.layers, model.key_value_heads, model.feed_forward) == ("llama", 64, 8, 28672)
    assert found.unpredicted == ("--vocab-size is not given; predicted with 50304",)
    assert found.key("loops") == "--num-layers-per-virtual-pipeline-stage"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "x --bf16 --lr 1e-4 --data-path 0.5 a 0.5 b",
            {"--bf16": True, "--lr": "1e-4", "--data-path": "0.5"},
        ),
        ("x --lr=3 --min_lr 2", {"--lr": "3", "--min-lr": "2"}),
        ("x --lr 1\nx --lr 2", {"--lr": "2"}),
        ("A=(--lr 1 --bf16)", {"--lr": "1", "--bf16": True}),
        (
            "N=$((2*3))\nx --lr $N --decay ${M:-7} --seed ${K}",
            {"--lr": "6", "--decay": "7", "--seed": "${K}"},
        ),
        ("N=$((2*$UNKNOWN))\nx --lr $N", {"--lr": "$((2*$UNKNOWN))"}),
        ("N=$((1/0))\nx --lr $N", {"--lr": "$((1/0))"}),
        ("x --lr 'unfinished", {"--lr": "unfinished"}),
    ],
)
def test_options_of_a_text(text: str, options: dict[str, Any]) -> None:
    assert options_of(text) == options


@pytest.mark.parametrize(
    ("layout", "stages"), [("Et*3|t*4|t*3L", 3), ("E|(t|)*3,m|m||L", 8), ("Et*2|(tt|)*29,m|L", 32)]
)
def test_stages_of_a_layout(layout: str, stages: int) -> None:
    assert len(stages_of(layout)) == stages


@pytest.mark.parametrize(
    ("options", "sharding", "island"),
    [
        ("", "zero-0", None),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "zero-1", 8),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero-2", None),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "zero-3", None),
        ("--use-torch-fsdp2", "zero-3", None),
    ],
)
def test_what_megatron_lm_shares_out(options: str, sharding: str, island: int | None) -> None:
    text = f"torchrun --nproc-per-node 8 --nnodes 2 x --tensor-model-parallel-size 1 {options}"
    assert fields(read_configuration(text, "x"), "sharding", "island") == (sharding, island)


def test_what_megatron_lm_does_and_weft_does_not_predict() -> None:
    text = "x --tensor-model-parallel-size 1 --num-experts 8 --fp8-format hybrid --optimizer-cpu-offload"
    found = read_configuration(text, "x")
    assert found.unpredicted == ("--fp8-format: fp8 products: predicted in the precision beside them",)
    assert found.incomparable == (
        "--num-experts: a mixture of experts, which this reader takes for a dense model",
        "--optimizer-cpu-offload: optimizer states in host memory are not modelled",
    )


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--multi-latent-attention --num-experts 8", ["--num-experts", "--multi-latent-attention"]),
        ("--hybrid-attention-ratio 0.1", ["--hybrid-attention-ratio"]),
        ("--language-model-type llama --img-h 336", ["--language-model-type", "--img-h"]),
        ("--freeze-LM", ["--freeze-LM"]),
        ("--inference-max-requests 8 --num-tokens-to-generate 9", ["--num-tokens-to-generate", "--inf"]),
        ("--optimizer muon", ["--optimizer"]),
        ("--optimizer adam --img-height 3", []),
    ],
)
def test_what_makes_a_megatron_script_another_job(options: str, keys: list[str]) -> None:
    found = read_configuration(f"x --tensor-model-parallel-size 1 {options}", "x").incomparable
    assert len(found) == len(keys)
    assert all(line.startswith(key) for line, key in zip(found, keys, strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--bf16", None),
        ("--bf16 --grad-reduce-in-bf16", "bf16"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", None),
        ("--fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", None),
        ("--grad-reduce-in-bf16", None),
    ],
)
def test_in_which_precision_megatron_lm_reduces(options: str, expected: str | None) -> None:
    found = read_configuration(f"x --tensor-model-parallel-size 1 {options}", "x")
    assert found.reduce_precision == expected
    accumulated = [line for line in found.unpredicted if "accumulated in bf16" in line]
    assert len(accumulated) == ("--grad-reduce-in-bf16" in options)


@pytest.mark.parametrize(
    ("precision", "said", "expected"),
    [
        ("bf16", None, None),
        ("bf16", "bf16", "bf16"),
        ("bf16", "FP32", "fp32"),
        ("fp16", "fp16", "fp16"),
        # Losses in bf16 are not scaled.
        ("bf16", "fp16", None),
        ("bf16", "int8", None),
    ],
)
def test_in_which_precision_deepspeed_reduces(precision: str, said: str | None, expected: str | None) -> None:
    record = {"train_batch_size": 8, precision: {"enabled": True}, "communication_data_type": said}
    found = read_configuration(json.dumps(record), "ds.json")
    assert found.reduce_precision == expected
    unknown = [f"communication_data_type {said}: predicted with reductions in fp32"]
    assert list(found.unpredicted) == (unknown if said is not None and expected is None else [])


@pytest.mark.parametrize(
    ("name", "text", "lists"),
    [
        ("a.toml", '[training]\n[parallelism]\n[optimizer]\nname = "AdamW"\n', False),
        ("a.toml", '[training]\n[parallelism]\n[optimizer]\nimplementation = "foreach"\n', True),
        ("ds.json", '{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}', False),
        (
            "ds.json",
            '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": true}}}',
            True,
        ),
        ("config.yml", "base_model: gpt2\nmicro_batch_size: 1\noptimizer: adamw_torch\n", True),
        ("config.yml", "base_model: gpt2\nmicro_batch_size: 1\noptimizer: adamw_torch_fused\n", False),
    ],
)
def test_which_optimizers_step_lists_of_tensors(name: str, text: str, lists: bool) -> None:
    assert read_configuration(text, name).optimizer == (FOREACH_ADAMW if lists else ADAMW)


@pytest.mark.parametrize(
    ("name", "text", "launch"),
    [
        ("a.toml", "[training]\n[parallelism]\n", "eager"),
        ("a.toml", "[training]\ncompile = true\n[parallelism]\n", "compiled"),
        ("a.toml", "[training]\n[parallelism]\n[compile]\nenable = true\n", "compiled"),
        ("a.toml", "[training]\n[parallelism]\n[compile]\nenable = false\n", "eager"),
        ("a.toml", '[training]\n[parallelism]\n[compile]\nenable = true\ncomponents = ["loss"]\n', "eager"),
        ("x.sh", "x --tensor-model-parallel-size 1 --bf16", "eager"),
        ("x.sh", "x --tensor-model-parallel-size 1 --enable-cuda-graph", "captured"),
        ("x.sh", "x --tensor-model-parallel-size 1 --cuda-graph-impl local", "captured"),
        ("x.sh", "x --tensor-model-parallel-size 1 --cuda-graph-impl none", "eager"),
        ("config.yml", "base_model: gpt2\nmicro_batch_size: 1\ntorch_compile: true\n", "compiled"),
        ("config.yml", "base_model: gpt2\nmicro_batch_size: 1\n", "eager"),
        (
            "a.yaml",
            "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config:\n  dynamo_backend: INDUCTOR\n",
            "compiled",
        ),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\n", "eager"),
    ],
)
def test_how_hosts_launch_kernels(name: str, text: str, launch: str) -> None:
    assert read_configuration(text, name).launch == launch


def test_in_which_precision_torchtitan_reduces() -> None:
    text = '[training]\nmixed_precision_reduce = "{}"\n[parallelism]\n'
    for word, expected in (("float32", "fp32"), ("bfloat16", "bf16"), ("other", None)):
        assert read_configuration(text.format(word), "a.toml").reduce_precision == expected


def test_a_deepspeed_file_with_everything_left_to_the_program() -> None:
    record = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "zero_quantized_weights": True,
            "zero_quantized_gradients": "true",
            "zero_hpz_partition_size": 8,
        },
        "data_types": {"grad_accum_dtype": "bf16"},
        "bf16": {"enabled": "auto"},
    }
    found = read_configuration(json.dumps(record), "ds.json")
    assert fields(found, "stack", "micro_batch_size", "replicas", "sharding", "precision", "recompute") == (
        "DeepSpeed",
        None,
        None,
        "zero-3",
        None,
        None,
    )
    assert found.unpredicted == (
        "zero_optimization.zero_quantized_weights: predicted with whole weights",
        "zero_optimization.zero_quantized_gradients: predicted with whole gradients",
        "zero_optimization.zero_hpz_partition_size: predicted without second copies of weights",
        "data_types.grad_accum_dtype bf16: predicted with the engine's usual gradients",
    )
    assert found.incomparable == (
        "zero_optimization.offload_optimizer.device cpu: steps and gathers over the host's memory are not "
        "modelled",
    )
    assert found.supposed == {"micro_batch_size": 8, "micro_batches": 1}


@pytest.mark.parametrize(
    ("change", "blocking"),
    [
        (
            {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}},
            ("gathers", "messages", "reductions"),
        ),
        ({"zero_optimization": {"stage": 0, "overlap_comm": True}}, ("reductions",)),
        ({"zero_optimization": {"stage": 1, "overlap_comm": False}}, ("gathers", "reductions")),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, ("gathers",)),
        ({"zero_optimization": {"stage": 2}}, ("gathers", "reductions")),
        ({"zero_optimization": {"stage": 3}}, ()),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, ("gathers", "reductions")),
    ],
)
def test_what_deepspeed_does_not_overlap(change: dict[str, Any], blocking: tuple[str, ...]) -> None:
    text = json.dumps({"train_micro_batch_size_per_gpu": 1} | change)
    assert read_configuration(text, "ds.json").layout.blocking == blocking


@pytest.mark.parametrize(
    ("lines", "sharding", "recompute"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}", "zero-2", None),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", "zero-3", None),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: FULL_SHARD}", "zero-3", None),
        (
            "distributed_type: FSDP\n"
            "fsdp_config: {fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}",
            "zero-2",
            "full",
        ),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", "zero-3", None),
        ("distributed_type: MULTI_GPU", "zero-0", None),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_recompute_activations: true}",
            "zero-0",
            "selective",
        ),
    ],
)
def test_plugins_of_accelerate(lines: str, sharding: str, recompute: str | None) -> None:
    found = read_configuration(lines, "a.yaml")
    assert fields(found, "stack", "sharding", "recompute") == ("Accelerate", sharding, recompute)


@pytest.mark.parametrize(("machines", "island"), [(1, None), (2, 8), (16, None)])
def test_hybrid_strategies_share_out_in_each_machine(machines: int, island: int | None) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 16\nnum_machines: {machines}\n"
    text += "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}"
    assert read_configuration(text, "a.yaml").layout.island == island


@pytest.mark.parametrize(
    "line", ["compute_environment: AMAZON_SAGEMAKER", "distributed_type: TPU", "distributed_type: XLA"]
)
def test_files_of_accelerate_for_other_devices_are_refused(line: str) -> None:
    key = line.partition(":")[0]
    with pytest.raises(InputError, match=rf"^a\.yaml: {key}: \w+: weft predicts .*$"):
        read_configuration(f"{line}\nnum_processes: 8\n", "a.yaml")


def test_what_accelerate_does_and_weft_does_not_predict(tmp_path: Path) -> None:
    text = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: fp8
deepspeed_config:
  deepspeed_config_file: ds.json
  offload_param_device: cpu
"""
    offloaded = "deepspeed_config.offload_param_device cpu: what is kept in host memory is not modelled"
    found = read_configuration(text, str(tmp_path / "a.yaml"))
    assert found.unpredicted == ("mixed_precision fp8: predicted in the cluster's usual precision",)
    absent = "deepspeed_config.deepspeed_config_file ds.json: there is no such file here"
    assert found.incomparable[0] == offloaded
    assert found.incomparable[1].startswith(absent)
    assert found.layout.sharding is None
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4, '
        '"gradient_accumulation_steps": "auto"}'
    )
    found = read_configuration(text, str(tmp_path / "a.yaml"))
    assert found.incomparable == (offloaded,)
    assert fields(found, "sharding", "micro_batch_size") == ("zero-1", 4)
    assert found.supposed == {"micro_batches": 1}


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B-Instruct
load_in_4bit: true
adapter: qlora
datasets:
  - path: my/conversations
    type: chat_template
sequence_len: 8192
sample_packing: true
flash_attention: true
micro_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: offload
dp_shard_size: 4
dp_replicate_size: 2
context_parallel_size: 2
bf16: auto
"""


LOW_RANK = """
base_model: NousResearch/Meta-Llama-3-8B
adapter: {adapter}
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: {linear}
datasets: [{{path: my/conversations, type: alpaca}}]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
"""


@pytest.mark.parametrize(
    ("adapter", "lines", "more"),
    [
        ("lora", "", {"targets": []}),
        ("lora", "load_in_8bit: true", {"targets": [], "base": "int8"}),
        ("qlora", "load_in_4bit: true", {"targets": [], "base": "nf4"}),
        (
            "lora",
            "lora_target_modules: [q_proj, self_attn.v_proj, mlp.up_proj]",
            {"targets": ["q_proj", "v_proj", "up_proj"]},
        ),
    ],
)
def test_low_rank_products_of_an_axolotl_file(adapter: str, lines: str, more: dict[str, object]) -> None:
    named = "lora_target_modules" in lines
    text = LOW_RANK.format(adapter=adapter, linear="false" if named else "true") + lines
    found = read_configuration(text, "config.yml")
    assert found.tables == {"lora": {"rank": 32, "alpha": 16, "dropout": 0.05, **more}}
    assert found.incomparable == ()
    keys = [line.split()[0].rstrip(":") for line in found.unpredicted]
    assert keys == (["load_in_4bit"] if adapter == "qlora" else [])


def test_the_few_states_of_an_adapter_may_be_those_of_any_optimizer() -> None:
    text = LOW_RANK.format(adapter="lora", linear="true").replace("adamw_bnb_8bit", "muon")
    found = read_configuration(text, "config.yml")
    assert found.incomparable == ()
    assert found.unpredicted[-1] == "optimizer muon: predicted as AdamW; the states of an adapter are few"


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        *(("adamw_torch_fused", 8), ("paged_adamw_32bit", 8), ("adamw_bnb_8bit", 2), ("paged_adamw_8bit", 2)),
        *(("adamw_torch_4bit", 1), ("lion_32bit", 4), ("paged_lion_8bit", 1)),
    ],
)
def test_the_states_of_an_optimizer_have_their_sizes(optimizer: str, state_bytes: int) -> None:
    text = f"base_model: gpt2\ndatasets: [{{path: mine}}]\nmicro_batch_size: 1\noptimizer: {optimizer}\n"
    found = read_configuration(text, "config.yml")
    assert found.optimizer.kept_bytes(4) == state_bytes
    assert found.incomparable == ()
    paged = f"optimizer {optimizer}: predicted with all states on the devices"
    assert found.unpredicted == ((paged,) if optimizer.startswith("paged_") else ())


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("lora_target_modules: 'model.layers.[0-9]+.self_attn.q_proj'", "lora_target_modules"),
        ("lora_target_modules: [experts.up_proj]", "lora_target_modules"),
        ("lora_target_linear: true\nlora_modules_to_save: [embed_tokens]", "lora_modules_to_save"),
        ("lora_target_linear: true\npeft_use_dora: true", "peft_use_dora"),
        ("lora_target_linear: true\ngptq: true", "gptq"),
        ("lora_target_linear: true\nfsdp: [full_shard]", "adapter"),
        ("lora_target_linear: true\ndp_shard_size: 2", "adapter"),
    ],
)
def test_adapters_that_weft_does_not_model(lines: str, key: str) -> None:
    text = f"base_model: gpt2\nadapter: lora\nmicro_batch_size: 1\nlora_r: 8\n{lines}\n"
    found = read_configuration(text, "config.yml")
    assert [line.split()[0] for line in found.incomparable] == [key]
    assert found.tables == {}


def test_an_axolotl_file() -> None:
    found = read_configuration(AXOLOTL, "config.yml")
    assert found.stack == "Axolotl"
    axes = ("replicas", "island", "cp", "micro_batch_size", "micro_batches", "sequence")
    assert fields(found, *axes) == (8, 4, 2, 2, 8, 8192)
    assert fields(found, "sharding", "recompute", "precision") == ("zero-3", "full", "bf16")
    assert found.ranks == 16
    assert found.samples_per_step == 128
    assert found.unpredicted == ("sample_packing: predicted as full samples of sequence_len tokens",)
    assert found.incomparable == (
        "adapter qlora without lora_target_modules: known are names of linear layers in blocks, or "
        "lora_target_linear: true",
        "adapter qlora: frozen weights that replicas share out are not modelled",
        "gradient_checkpointing offload: activations in host memory are not modelled",
    )


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ("optimizer: adamw_torch_fused", []),
        ("optimizer: paged_adamw_8bit", []),
        ("optimizer: adafactor", ["optimizer"]),
        ("fsdp: [full_shard]\nfsdp_config: {fsdp_offload_params: true}", ["fsdp_config.fsdp_offload_params"]),
        ("fsdp: [full_shard]\nfsdp_config: {offload_params: false}", []),
        ("rl: dpo", ["rl"]),
        ("process_reward_model: true", ["process_reward_model"]),
        ("processor_type: AutoProcessor", ["processor_type"]),
        ("qat: {weight_dtype: int4}", ["qat"]),
        ("liger_rms_norm: true", []),
        ("liger_fused_linear_cross_entropy: true\ntensor_parallel_size: 2", []),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]", []),
        ("fp8: true", []),
    ],
)
def test_what_makes_an_axolotl_file_another_job(lines: str, keys: list[str]) -> None:
    found = read_configuration(f"base_model: gpt2\nmicro_batch_size: 1\n{lines}\n", "config.yml")
    assert [line.split()[0].rstrip(":") for line in found.incomparable] == keys
    assert len(found.unpredicted) == lines.startswith(("liger_", "plugins", "fp8", "optimizer: paged"))


@pytest.mark.parametrize("key", ["activation_checkpointing", "fsdp_activation_checkpointing"])
def test_axolotls_keys_of_fsdp_may_begin_with_its_name(key: str) -> None:
    text = f"base_model: gpt2\nmicro_batch_size: 1\nfsdp_config: {{{key}: true}}\n"
    assert read_configuration(text, "config.yml").layout.recompute == "full"


@pytest.mark.parametrize(
    ("lines", "loss"),
    [
        ("liger_fused_linear_cross_entropy: true", "fused"),
        ("cut_cross_entropy: true", "fused"),
        ("plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]", "fused"),
        ("cut_cross_entropy: false\nplugins: [axolotl.integrations.CutCrossEntropyPlugin]", None),
        ("liger_fused_linear_cross_entropy: true\ntensor_parallel_size: 2", None),
        ("liger_cross_entropy: true", None),
    ],
)
def test_kernels_of_axolotl_for_the_loss(lines: str, loss: str | None) -> None:
    found = read_configuration(f"base_model: gpt2\nmicro_batch_size: 1\n{lines}\n", "config.yml")
    assert found.layout.loss == loss


@pytest.mark.parametrize(
    ("strategy", "on", "island"),
    [
        ("HYBRID_SHARD", "16xa100-80gb", 8),
        ("HYBRID_SHARD", "8xa100-80gb", None),
        ("FULL_SHARD", "16xa100-80gb", None),
    ],
)
def test_hybrid_strategies_of_axolotl_share_out_in_each_node(
    strategy: str, on: str, island: int | None
) -> None:
    text = "base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 512\nfsdp: [full_shard]\n"
    text += f"fsdp_config: {{fsdp_sharding_strategy: {strategy}}}\n"
    found = explain_text(text, "config.yml", Answers(on=on), search=False)
    assert found.implied is not None
    assert found.implied.layout.island == island


ZERO_3 = '{"zero_optimization": {"stage": 3}}'


@pytest.mark.parametrize(
    ("line", "content", "sharding", "known"),
    [
        # The name says 2, the file says 3.
        ("deepspeed: configs/zero2.json", ZERO_3, "zero-3", True),
        ("deepspeed: configs/zero2.json", None, None, False),
        ("deepspeed: {zero_optimization: {stage: 1}}", None, "zero-1", True),
        ("fsdp: [full_shard]", None, "zero-3", True),
        ("fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", None, "zero-2", True),
        ("fsdp_config: {reshard_after_forward: false}", None, "zero-2", True),
    ],
)
@pytest.mark.parametrize("folder", [".", "examples/llama"])
def test_what_axolotl_shares_out(
    tmp_path: Path, folder: str, line: str, content: str | None, sharding: str | None, known: bool
) -> None:
    text = f"base_model: gpt2\nmicro_batch_size: 1\n{line}\n"
    (tmp_path / "configs").mkdir()
    if content is not None:
        (tmp_path / "configs" / "zero2.json").write_text(content)
    found = read_configuration(text, str(tmp_path / folder / "config.yml"))
    assert found.layout.sharding == sharding
    assert (found.incomparable == ()) == known


def test_a_named_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text("stage: 2")
    text = "base_model: gpt2\nmicro_batch_size: 1\ndeepspeed: zero.json\n"
    with pytest.raises(InputError, match=r"zero\.json: named by .*config\.yml: not a JSON object"):
        read_configuration(text, str(tmp_path / "config.yml"))


TORCHTITAN = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
local_batch_size = 16
seq_len = 8192
enable_cpu_offload = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
expert_parallel_degree = 2
"""


def test_a_torchtitan_file() -> None:
    found = read_configuration(TORCHTITAN, "job.toml")
    assert found.stack == "torchtitan"
    assert fields(found, "pp", "tp", "replicas", "island", "loops") == (
        4,
        8,
        16,
        8,
        2,
    )
    assert fields(found, "micro_batch_size", "micro_batches", "samples_per_step") == (2, 8, 256)
    # With a pipeline weights are not given back between forward and backward, unless it is asked for.
    assert fields(found, "sharding", "recompute", "schedule") == ("zero-2", "selective", "depth-first")
    assert found.model == "llama-3-70b"
    assert found.unpredicted == (
        "activation_checkpoint.selective_ac_option 2: one block in 2 is recomputed; predicted as all blocks "
        "without their products",
        "model.converters ['float8']: predicted in the precision beside them",
    )
    assert found.incomparable == (
        "training.enable_cpu_offload: weights and states in host memory are not modelled",
        "parallelism.expert_parallel_degree: torchtitan shares all other weights out among expert ranks, "
        "too; weft's ep does not",
    )


def test_a_torchtitan_file_of_2024_has_its_degrees_in_other_tables() -> None:
    text = """
[training]
batch_size = 8
tensor_parallel_degree = 4
data_parallel_shard_degree = 2
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_degree = 2
[activation_checkpoint]
"""
    found = read_configuration(text, "job.toml")
    assert fields(found, "pp", "tp", "cp", "dp", "loops", "schedule") == (2, 4, 2, 2, 2, "depth-first")


@pytest.mark.parametrize(("each", "loops"), [(10, 2), (5, 4)])
def test_torchtitan_counts_stages_by_their_layers(each: int, loops: int) -> None:
    keys = f"pipeline_parallel_layers_per_stage = {each}\npipeline_parallel_first_stage_less_layers = 0\n"
    keys += "pipeline_parallel_last_stage_less_layers = 0"
    text = TORCHTITAN.replace("expert_parallel_degree = 2", keys)
    assert read_configuration(text, "job.toml").layout.loops == loops
    unknown = read_configuration(text.replace("70B", "7B"), "job.toml")
    assert unknown.layout.loops == 2
    assert any("layers_per_stage" in line for line in unknown.unpredicted)


def test_schedules_that_weft_lacks_are_predicted_as_the_nearest_aloud() -> None:
    for name, schedule in (("InterleavedZeroBubble", "depth-first"), ("DualPipeV", "zb-v")):
        found = read_configuration(TORCHTITAN.replace("Interleaved1F1B", name), "job.toml")
        assert found.layout.schedule == schedule
        assert found.unpredicted[0].startswith(f"parallelism.pipeline_parallel_schedule {name}: predicted as")


def test_options_of_torchtitan_that_weft_predicts_otherwise_are_said() -> None:
    text = """
[training]
dtype = "bfloat16"
[parallelism]
disable_loss_parallel = true
[optimizer]
implementation = "for-loop"
early_step_in_backward = true
[activation_checkpoint]
mode = "memory_budget"
"""
    found = read_configuration(text, "job.toml")
    assert [line.partition(":")[0] for line in found.unpredicted] == [
        "activation_checkpoint.mode memory_budget",
        "optimizer.implementation for-loop",
        "optimizer.early_step_in_backward True",
        "parallelism.disable_loss_parallel True",
    ]
    assert [line.partition(":")[0] for line in found.incomparable] == ["training.dtype bfloat16"]


def test_torchtitan_counts_split_points() -> None:
    text = TORCHTITAN.replace(
        "expert_parallel_degree = 2",
        'pipeline_parallel_split_points = ["layers.20", "layers.40", "layers.60"]',
    )
    found = read_configuration(text, "job.toml")
    assert found.layout.loops == 1
    assert found.split == StageSplit(layers=(21, 20, 20, 21))
    line = "parallelism.pipeline_parallel_split_points: predicted with balanced stages"
    for known, other in (("70B", "7B"), ("layers.40", "layers.10"), ("layers.40", "layers.x")):
        unknown = read_configuration(text.replace(known, other), "job.toml")
        assert unknown.split is None
        assert line in unknown.unpredicted


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"train_batch_size": 0}', "x: train_batch_size: 0: a count of at least 1 (nearest valid: 1)"),
        (
            '{"train_batch_size": 5000000000}',
            "x: train_batch_size: 5000000000: a count of at most 1000000000 (nearest valid: 1000000000)",
        ),
        (
            '{"train_batch_size": "many"}',
            "x: train_batch_size: 'many': a count of at least 1 (nearest valid: 1)",
        ),
        (
            "y --tensor-model-parallel-size $TP",
            "x: --tensor-model-parallel-size: '$TP' is set outside this file; put the number in its place "
            "(nearest valid: 1)",
        ),
        (
            "[training]\nseq_len = true\n[parallelism]\n",
            "x: training.seq_len: True: a count of at least 1 (nearest valid: 1)",
        ),
    ],
)
def test_a_degree_that_is_no_count_is_refused(text: str, line: str) -> None:
    with pytest.raises(InputError) as refused:
        read_configuration(text, "x")
    assert str(refused.value) == line


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{}", "[]", "a: b", "- 1\n- 2", "[a]\nb = 1", '{"a": {"b": 1}}', "\x00"],
)
def test_what_is_not_recognised_is_refused_with_what_can_be_read(text: str) -> None:
    with pytest.raises(InputError) as refused:
        read_configuration(text, "file")
    assert str(refused.value) == (
        "file: not recognised; can be read: a DeepSpeed JSON, an Accelerate YAML, an Axolotl YAML, a "
        "torchtitan "
        "TOML or Python, a Megatron-LM command line, or a trace of torch.profiler (JSON or .json.gz)"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "line 1, column 2: Expecting property name enclosed in double quotes"),
        ("{" * 10_000, "line 1, column 2: Expecting property name enclosed in double quotes"),
        ('{\n  "train_batch_size": BATCH\n}', "line 2, column 23: Expecting value"),
    ],
)
def test_a_template_that_is_no_json_yet_is_refused_with_the_place(text: str, line: str) -> None:
    with pytest.raises(InputError) as refused:
        read_configuration(text, "file")
    assert str(refused.value) == f"file: not valid JSON: {line}"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "job.toml",
            "[training]\nseq_len = 8192 tokens\n",
            "not valid TOML: Expected newline or end of document after a statement (at line 2, column 16)",
        ),
        (
            "a.yml",
            "distributed_type: FSDP\n num_processes: 8\n",
            "not valid YAML: line 2, column 15: mapping values are not allowed here",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_place(name: str, text: str, line: str) -> None:
    with pytest.raises(InputError) as refused:
        read_configuration(text, name)
    assert str(refused.value) == f"{name}: {line}"


TITAN = """\
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def small() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=2 * 4, seq_len=4096, max_norm=limit()),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=4),
        activation_checkpoint=FullAC.Config(),
    )
"""


def test_a_configuration_of_torchtitan_in_python_is_read_and_not_run() -> None:
    configuration = read_configuration(TITAN, "config_registry.py")
    assert configuration.stack == "torchtitan"
    assert configuration.model == "llama-3-8b"
    assert (configuration.layout.tp, configuration.layout.dp) == (2, 4)
    assert (configuration.layout.micro_batch_size, configuration.sequence) == (8, 4096)
    assert configuration.layout.recompute == "full"
    assert "training.max_norm" not in configuration.given


def test_values_that_a_configuration_in_python_sets_later() -> None:
    text = TITAN.replace("return Trainer", "config: Trainer.Config = Trainer")
    text += """\
    config.training.local_batch_size = 2
    config.training.seq_len = 2048
    config.training.steps = count()
    config.compile.enable = True
    config.activation_checkpoint = SelectiveAC.Config()
    config.parallelism.data_parallel_shard_degree *= 2
    other.training.seq_len = 1
    if wide:
        config.parallelism.tensor_parallel_degree = 4
    return config
"""
    found = read_configuration(text, "config_registry.py")
    assert fields(found, "micro_batch_size", "sequence", "recompute") == (2, 2048, "selective")
    assert found.launch == "compiled"
    assert fields(found, "tp", "dp") == (None, None)
    assert found.unpredicted == (
        "parallelism.data_parallel_shard_degree: set by code, which weft does not run",
        "parallelism.tensor_parallel_degree: set by code, which weft does not run",
    )


def test_an_order_of_torchtitan_in_a_csv_is_not_read() -> None:
    key = "parallelism.pipeline_parallel_schedule_csv"
    for name, schedule, loops in (("Multi", "depth-first", 2), ("Single", "1f1b", 1)):
        text = TORCHTITAN.replace("Interleaved1F1B", f"PipelineSchedule{name}")
        text += 'pipeline_parallel_schedule_csv = "order.csv"\n'
        found = read_configuration(text, "job.toml")
        assert fields(found, "schedule", "loops") == (schedule, loops)
        assert f"{key}: weft does not read the CSV; predicted as {schedule}" in found.unpredicted
        assert not [one for one in findings(found) if "schedule" in one.violation.where]


def test_optimizers_and_converters_of_a_configuration_in_python() -> None:
    groups = ", ".join(
        f'ParamGroupConfig(pattern="{name}", optimizer_name="{name}")' for name in ("AdamW", "Muon")
    )
    words = (
        f"optimizer=OptimizersContainer.Config(param_groups=[{groups}], implementation='foreach'),\n"
        "        model_converters=Converters.Config(converters=[Float8LinearConverter.Config()]),\n"
        "        training="
    )
    found = read_configuration(TITAN.replace("training=", words), "config_registry.py")
    assert found.incomparable == ("optimizer.name Muon: the sizes of its states are not modelled here",)
    line = "model.converters ['Float8LinearConverter']: predicted in the precision beside them"
    assert found.unpredicted == (line,)
    assert read_configuration(TITAN, "config_registry.py").unpredicted == ()


@pytest.mark.parametrize(
    ("called", "recompute"),
    [
        ('ActivationCheckpointConfig(mode="full")', "full"),
        ("SelectiveAC.Config()", "selective"),
        ("None", "none"),
        ("ours()", None),
    ],
)
def test_recomputation_of_a_configuration_in_python(called: str, recompute: str | None) -> None:
    text = TITAN.replace("FullAC.Config()", called)
    assert read_configuration(text, "config_registry.py").layout.recompute == recompute


def test_several_configurations_in_one_module_are_refused_with_their_names() -> None:
    text = TITAN + TITAN.replace("def small", "def large")
    with pytest.raises(InputError) as refused:
        read_configuration(text, "config_registry.py")
    line = "2 configurations (small, large); keep one function in the file (nearest valid: small)"
    assert str(refused.value) == f"config_registry.py: {line}"


def test_a_flavor_of_another_model_is_not_taken_for_a_llama() -> None:
    text = TITAN.replace("torchtitan.models.llama3", "torchtitan.models.qwen3")
    assert read_configuration(text, "config_registry.py").model is None


def test_accelerates_second_way_to_divide_a_sample_is_read() -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\nparallelism_config:\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_cp_size: 1\n"
        "  parallelism_config_sp_size: 2\n"
    )
    assert read_configuration(text, "file.yaml").layout.cp == 2


def test_aliases_that_stand_for_too_much_are_refused() -> None:
    lines = ["distributed_type: FSDP", "a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 20)]
    with pytest.raises(InputError, match="x: more than 20000 entries; not a configuration"):
        read_configuration("\n".join(lines), "x")


def test_nested_tables_have_dotted_keys() -> None:
    assert flat({"a": {"b": {"c": 1}}, "d": [1]}) == {"a": {}, "a.b": {}, "a.b.c": 1, "d": [1]}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama-3-405b"),
        ("NousResearch/Llama-2-7b-hf", "llama-7b"),
        ("openai-community/gpt2", "gpt2"),
        ("gpt2-xl", "gpt2-xl"),
        ("llama-3-8b", "llama-3-8b"),
        ("somebody/llama-3-80b", "somebody/llama-3-80b"),
    ],
)
def test_presets_of_models_elsewhere(name: str, preset: str) -> None:
    assert preset_of(name) == preset


ZERO_OF = (
    '{{"train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": true}}, '
    '"zero_optimization": {{"stage": {stage}{more}}}}}'
)


def of_deepspeed(reduced: int, gathered: int = 5 * 10**8) -> StatedMemory:
    return StatedMemory(stack="deepspeed", buffers=Buffers(reduced=reduced, gathered=gathered))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ds.json", ZERO_OF.format(stage=0, more=""), LIKE_WEFT),
        ("ds.json", ZERO_OF.format(stage=2, more=""), of_deepspeed(500_000_000)),
        # A bucket fills while another one is reduced.
        (
            "ds.json",
            ZERO_OF.format(stage=2, more=', "overlap_comm": true, "reduce_bucket_size": 2e8'),
            of_deepspeed(400_000_000),
        ),
        (
            "ds.json",
            ZERO_OF.format(stage=1, more=', "allgather_bucket_size": 6e8'),
            of_deepspeed(5 * 10**8, 6 * 10**8),
        ),
        (
            "ds.json",
            ZERO_OF.format(stage=3, more=', "allgather_bucket_size": 6e8'),
            of_deepspeed(5 * 10**8, 10**9),
        ),
        (
            "ds.json",
            ZERO_OF.format(stage=3, more=', "reduce_bucket_size": "auto", "stage3_max_live_parameters": 3e8'),
            of_deepspeed(500_000_000, 300_000_000),
        ),
        ("a.toml", "[training]\n[parallelism]\n", StatedMemory(stack="fsdp2")),
        ("a.toml", "[training]\n[parallelism]\ndata_parallel_shard_degree = 1\n", LIKE_WEFT),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", StatedMemory(stack="fsdp2")),
        ("a.yaml", "distributed_type: MULTI_GPU", LIKE_WEFT),
        # All buckets of DDP together are as large as all gradients.
        ("a.yaml", "base_model: gpt2\nmicro_batch_size: 1\nddp_bucket_cap_mb: 100\n", LIKE_WEFT),
        ("a.yaml", "distributed_type: MEGATRON_LM", StatedMemory(stack="megatron-lm")),
        ("x.sh", "x --bf16 --use-distributed-optimizer", StatedMemory(stack="megatron-lm")),
        ("x.sh", "x --bf16 --num-attention-heads 8 --use-torch-fsdp2", StatedMemory(stack="fsdp2")),
    ],
)
def test_whose_states_and_buffers_a_file_has(name: str, text: str, expected: StatedMemory) -> None:
    assert read_configuration(text, name).memory == expected


@pytest.mark.parametrize("size", ["0", "-5", '"large"', "true", "0.5"])
@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size", "stage3_max_live_parameters"])
def test_sizes_of_buffers_are_positive(key: str, size: str) -> None:
    text = ZERO_OF.format(stage=2, more=f', "{key}": {size}')
    with pytest.raises(InputError) as caught:
        read_configuration(text, "ds.json")
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"ds.json: zero_optimization.{key}: ")
    assert "the size of a buffer is a positive whole number" in line


def test_the_size_of_a_bucket_of_ddp_is_positive() -> None:
    text = "base_model: gpt2\nmicro_batch_size: 1\nddp_bucket_cap_mb: -1\n"
    with pytest.raises(InputError, match=r"a\.yaml: ddp_bucket_cap_mb: -1: the size of a buffer is"):
        read_configuration(text, "a.yaml")


def test_steps_of_deepspeed_gather_where_reductions_have_left() -> None:
    """Half of eight ranks' gradients are on the way at once, and then all weights that a step has changed."""
    answers, held = Answers(model="llama-7b", on="8xa100-80gb", recompute="none"), {}
    for gathered in (200_000_000, 1_000_000_000):
        more = f', "reduce_bucket_size": 300000000, "allgather_bucket_size": {gathered}'
        found = explain_text(ZERO_OF.format(stage=1, more=more), "ds.json", answers, search=False)
        assert found.plan is not None
        held[gathered] = {part.name: part.value for part in found.plan.held}
        assert held[gathered]["arriving gradients"] == 2.0 * 300_000_000
    assert "sharding buffers" not in held[200_000_000]
    assert held[1_000_000_000]["sharding buffers"] == 2.0 * 700_000_000


def test_buffers_of_an_explained_file_have_sizes_and_sources() -> None:
    """Buckets are allocated whole; a rank never gathers more weights than it has."""
    answers = Answers(model="llama-7b", on="8xa100-80gb", recompute="none")
    weights, peaks = layer_graph(resolve_model("llama-7b")).parameters(), {}
    for bucket in (200_000_000, 500_000_000):
        more = f', "reduce_bucket_size": {bucket}, "stage3_max_live_parameters": 400000000'
        text = ZERO_OF.format(stage=3, more=more)
        found = explain_text(text, "ds.json", answers, search=False)
        assert found.plan is not None
        parts = {part.name: part for part in found.plan.held}
        assert parts["arriving gradients"][1:] == (2.0 * bucket, 0.2, "bucket sizes of the file")
        assert parts["sharding buffers"].value == 2.0 * 400_000_000
        # Two moments and a master in fp32, weights and gradients in 16 bits; each rank has an eighth.
        states = sum(parts[name].value for name in ("weights", "gradients", "optimizer states"))
        assert states == pytest.approx(16 * weights / 8, rel=0.01)
        peaks[bucket] = max(found.plan.prediction.peak_bytes)
    assert peaks[500_000_000] - peaks[200_000_000] == pytest.approx(1.03 * 2 * 3e8, rel=1e-3)


def test_fsdp2_keeps_shards_of_masters_and_gathers_two_layers() -> None:
    text = "[training]\n[parallelism]\n[activation_checkpoint]\nmode = 'none'\n"
    answers = Answers(model="llama-7b", on="8xa100-80gb")
    found = explain_text(text, "a.toml", answers, search=False)
    assert found.plan is not None
    parts = {part.name: part for part in found.plan.held}
    graph = layer_graph(resolve_model("llama-7b"))
    assert "weights" not in parts
    assert parts["optimizer states"].value == pytest.approx(12 * graph.parameters() / 8, rel=0.01)
    assert parts["sharding buffers"].source == "FSDP2 gathers two layers at a time"
    sizes = [layer.parameters(Shape(1, 1024)) for layer in graph.layers]
    assert len(found.plan.plan.stages) == len(sizes)
    assert parts["sharding buffers"].value == pytest.approx(
        4 * (max(sizes[::2]) + max(sizes[1::2])), rel=0.01
    )


def test_other_stacks_share_tied_tables_out_like_the_rest() -> None:
    found = explain_text(
        ZERO_OF.format(stage=3, more=""), "ds.json", Answers(model="gpt2", on="8xa100-80gb"), search=False
    )
    assert found.plan is not None
    assert "whole copies of tied weights" not in {part.name for part in found.plan.held}
