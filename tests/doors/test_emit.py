"""What emitters write for layouts that other stacks have, nearly have, and do not have."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from doors.jobs import planned, run_of

from weft.describe.models import PRESETS
from weft.describe.plan import Choice, Replica
from weft.describe.run_file import changed
from weft.doors.emit import EMITTERS, OWN_RUNS, emit
from weft.doors.emit.base import Decided
from weft.doors.explain import read_configuration
from weft.errors import InputError
from weft.planning.planned_job import PlannedJob

PIPELINE = {"pp": 4, "dp": 4, "sharding": "zero-1"}


def lost(stack: str, job: PlannedJob) -> list[str]:
    return [str(loss) for loss in emit(job, stack).losses]


def with_optimizer(job: PlannedJob, **table: Any) -> PlannedJob:
    optimizer = job.run.optimizer.model_copy(update=table)
    return replace(job, run=job.run.model_copy(update={"optimizer": optimizer}))


def pipelined(**choices: Any) -> PlannedJob:
    return planned(run_of(), **(PIPELINE | choices))


def alone(**choices: Any) -> PlannedJob:
    return planned(run_of(), **({"dp": 16} | choices))


def test_an_unknown_stack_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"--emit: 'megatrn' is not one of .* \(nearest valid: megatron\)"):
        emit(alone(), "megatrn")


@pytest.mark.parametrize(
    ("scaling", "options", "is_lost"),
    [
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            ["--use-rope-scaling", "--rope-scaling-factor 8"],
            False,
        ),
        ({"type": "linear", "factor": 2.0}, ["--rotary-seq-len-interpolation-factor 2"], False),
        ({"rope_type": "default"}, [], False),
        ({"rope_type": "yarn", "factor": 4.0}, [], True),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}, [], True),
    ],
)
def test_megatron_lm_scales_positions_as_the_model_does(
    tmp_path: Path, scaling: dict[str, Any], options: list[str], is_lost: bool
) -> None:
    sizes = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"rope_scaling": scaling}))
    job = planned(run_of(str(tmp_path)), dp=16)
    text = emit(job, "megatron").text
    for option in options:
        assert f"{option} \\\n" in text
    assert text.count("rope-scaling") + text.count("interpolation") == len(options)
    assert any("rotary positions scaled by" in line for line in lost("megatron", job)) == is_lost


def test_megatron_lm_is_given_every_degree_and_size() -> None:
    job = planned(
        run_of("llama-3-8b"),
        pp=2,
        dp=2,
        tp=4,
        loops=2,
        schedule="depth-first",
        sharding="zero-1",
        recompute="full",
    )
    text = emit(job, "megatron").text
    for option in (
        "torchrun --nnodes 2 --nproc-per-node 8 --node-rank",
        "--tensor-model-parallel-size 4 ",
        "--pipeline-model-parallel-size 2 ",
        "--sequence-parallel ",
        "--num-layers-per-virtual-pipeline-stage 8 ",
        "--global-batch-size 64 ",
        "--use-distributed-optimizer ",
        "--recompute-method uniform ",
        "--group-query-attention ",
        "--num-query-groups 8 ",
        "--untie-embeddings-and-output-weights ",
        "--bf16 ",
    ):
        assert f" {option}" in text or f"\n{option}" in text, option
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in text
    assert lost("megatron", job) == []


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "deepspeed"])
def test_no_stack_is_told_how_hosts_launch_kernels(stack: str) -> None:
    job = planned(run_of("llama-7b", on="8xa100-80gb"), dp=8)
    compiled = replace(job, plan=job.plan.model_copy(update={"launch": "compiled"}))
    more = [line for line in lost(stack, compiled) if line not in lost(stack, job)]
    assert [line.startswith("lost: compiled layers; ") for line in more] == [True]
    assert more[0].endswith("; nearest: eager layers")


def reducing(precision: str, reduced: str | None) -> PlannedJob:
    job = planned(
        run_of("llama-7b", on="8xv100-32gb" if precision == "fp16" else "8xa100-80gb", precision=precision),
        dp=8,
    )
    return replace(job, plan=job.plan.model_copy(update={"reduce_precision": reduced}))


@pytest.mark.parametrize(
    ("precision", "reduced", "option"),
    [
        ("bf16", None, ""),
        ("bf16", "fp32", ""),
        ("bf16", "bf16", "--grad-reduce-in-bf16"),
        ("fp16", None, "--accumulate-allreduce-grads-in-fp32"),
        ("fp16", "fp16", ""),
    ],
)
def test_megatron_lm_is_told_the_precision_of_reductions(
    precision: str, reduced: str | None, option: str
) -> None:
    job = reducing(precision, reduced)
    text = emit(job, "megatron").text
    words = ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32")
    assert [word for word in words if word in text] == [option] * bool(option)
    assert read_configuration(text, "x.sh").reduce_precision == (None if reduced == "fp32" else reduced)
    one = "Megatron-LM has one precision for both; nearest: both in"
    expected = f"lost: gradients reduced in {reduced} and accumulated in fp32; {one} {reduced}"
    assert lost("megatron", job) == ([expected] if reduced == precision else [])


def test_stacks_without_a_word_for_the_precision_of_reductions_lose_it() -> None:
    usual, job = reducing("bf16", None), reducing("bf16", "bf16")
    for name, stack in (
        ("torchtitan", "torchtitan"),
        ("torchtitan-toml", "torchtitan"),
        ("accelerate", "Accelerate"),
    ):
        more = [line for line in lost(name, job) if line not in lost(name, usual)]
        assert more == [
            f"lost: gradients reduced in bf16, which {stack} is not told; nearest: its usual reductions"
        ]
    emitted = emit(job, "deepspeed")
    assert json.loads(emitted.text)["communication_data_type"] == "bf16"
    assert emitted.losses == emit(usual, "deepspeed").losses
    assert "communication_data_type" not in emit(usual, "deepspeed").text
    assert 'reduce_precision = "bf16"' in emit(job, "slurm").text
    assert "reduce_precision" not in emit(usual, "slurm").text


def test_megatron_lm_is_given_uneven_stages_as_a_layout() -> None:
    job = planned(run_of(), pp=3, dp=4, sharding="zero-1")
    first, second, third = Decided(job).blocks
    assert (
        f"--pipeline-model-parallel-layout 'Et*{first}|t*{second}|t*{third}L' " in emit(job, "megatron").text
    )


@pytest.mark.parametrize(
    ("stack", "choices", "line"),
    [
        (
            "megatron",
            {"schedule": "gpipe"},
            "lost: schedule gpipe, which Megatron-LM does not have; nearest: 1f1b",
        ),
        (
            "megatron",
            {"schedule": "breadth-first", "loops": 2},
            "lost: schedule breadth-first; Megatron-LM starts backwards before all forwards of a round are "
            "done; "
            "nearest: interleaved 1f1b that runs 16 micro-batches through each stage",
        ),
        (
            "megatron",
            {"schedule": "zb-v", "loops": 2},
            "lost: schedule zb-v, which Megatron-LM does not have; nearest: interleaved 1f1b (depth-first)",
        ),
        (
            "megatron",
            {"recompute": "selective"},
            "lost: selective recomputation of all but products: Megatron-LM runs only the attention's core "
            "again; "
            "nearest: --recompute-granularity selective, which keeps more",
        ),
        (
            "torchtitan",
            {"schedule": "zb-h1"},
            "lost: schedule zb-h1, which torchtitan does not have; nearest: 1F1B",
        ),
        (
            "torchtitan",
            {},
            "lost: zero-1: torchtitan shares out weights, too, between steps; nearest: "
            'fsdp_reshard_after_forward = "never", which gathers them once per step',
        ),
        (
            "torchtitan",
            {"recompute": "selective"},
            "lost: selective recomputation of all but products: torchtitan also runs every second product "
            "again; "
            "nearest: activation_checkpoint selective",
        ),
        (
            "torchtitan",
            {},
            "lost: the model's sizes (32 layers of 4096, 32 heads, 32 groups), which torchtitan takes from a "
            "flavor; nearest: register a flavor 'llama-7b' of llama3",
        ),
        (
            "deepspeed",
            {"schedule": "depth-first", "loops": 2},
            "lost: 2 stages per device (depth-first); DeepSpeed's pipeline has one; nearest: 1f1b with one "
            "stage "
            "per device",
        ),
        (
            "deepspeed",
            {"schedule": "gpipe"},
            "lost: schedule gpipe, which DeepSpeed does not have; nearest: 1f1b",
        ),
        (
            "deepspeed",
            {},
            "lost: stages of 8, 8, 8, 8 blocks, which the JSON does not name; nearest: "
            "PipelineModule(partition_method='parameters'), which balances parameters",
        ),
        (
            "deepspeed",
            {"sharding": "zero-2"},
            "lost: zero-2 with a pipeline, which DeepSpeed refuses; nearest: zero_optimization stage 1",
        ),
        (
            "deepspeed",
            {"island": 2},
            "lost: islands of 2 replicas, which DeepSpeed does not have; nearest: all replicas share states "
            "out",
        ),
        (
            "deepspeed",
            {"dp": 2, "tp": 2},
            "lost: a pipeline of tensor groups, of which DeepSpeed alone does only the pipeline; nearest: "
            "Megatron-DeepSpeed, whose layers are divided by its own mpu",
        ),
        (
            "accelerate",
            {"sharding": "zero-3"},
            "lost: zero-3 with a pipeline, which the Megatron-LM plugin does not have; nearest: "
            "use_distributed_optimizer (zero-1)",
        ),
        (
            "accelerate",
            {"island": 2},
            "lost: islands of 2 replicas, which the Megatron-LM plugin does not have; nearest: all replicas "
            "share states out",
        ),
        (
            "accelerate",
            {"recompute": "selective"},
            "lost: recompute selective, where the plugin's default is full and no key of the YAML takes it "
            "back; nearest: MegatronLMPlugin(other_megatron_args={'recompute_granularity': 'selective', "
            "'recompute_method': None, 'recompute_num_layers': None}) in the program",
        ),
        (
            "accelerate",
            {},
            "lost: recompute none, where the plugin's default is full and no key of the YAML takes it back; "
            "nearest: MegatronLMPlugin(other_megatron_args={'recompute_granularity': None, "
            "'recompute_method': None, 'recompute_num_layers': None}) in the program",
        ),
        (
            "accelerate",
            {"schedule": "gpipe"},
            "lost: schedule gpipe, which the plugin does not have; nearest: 1f1b",
        ),
        (
            "accelerate",
            {"schedule": "breadth-first", "loops": 2},
            "lost: 2 loops, breadth-first; the YAML has no key for stages per device; nearest: "
            "MegatronLMPlugin(num_layers_per_virtual_pipeline_stage=4) in the program",
        ),
        (
            "accelerate",
            {"pp": 3},
            "nearest: as many blocks in each, which their number must allow",
        ),
    ],
)
def test_what_a_pipeline_loses(stack: str, choices: dict[str, Any], line: str) -> None:
    assert any(line in one for one in lost(stack, pipelined(**choices)))


@pytest.mark.parametrize(
    ("stack", "choices", "line"),
    [
        (
            "deepspeed",
            {"dp": 8, "tp": 2, "sharding": "zero-3"},
            "lost: zero-3 with tensor ranks; nearest: zero_optimization stage 2",
        ),
        (
            "deepspeed",
            {"dp": 8, "cp": 2},
            "lost: context ranks that gather keys and values; DeepSpeed exchanges heads; nearest: Ulysses "
            "with "
            "sequence_parallel_size",
        ),
        (
            "deepspeed",
            {"recompute": "full"},
            "lost: recompute full, which the JSON configures and does not switch on; nearest: "
            "model.gradient_checkpointing_enable(), which recomputes whole blocks",
        ),
        (
            "accelerate",
            {"recompute": "full"},
            "lost: recompute full, which the YAML has no key for here; nearest: "
            "model.gradient_checkpointing_enable()",
        ),
        (
            "accelerate",
            {"recompute": "selective", "sharding": "zero-3"},
            "lost: recompute selective; nearest: fsdp_activation_checkpointing, which runs whole blocks",
        ),
        (
            "accelerate",
            {"sharding": "zero-2"},
            "lost: zero-2: Accelerate's FSDP2 shares out weights, too, between steps; nearest: "
            "fsdp_reshard_after_forward: false, which gathers them once per step",
        ),
        (
            "accelerate",
            {"sharding": "zero-1", "island": 8},
            "lost: islands of 8 replicas, which the DeepSpeed plugin does not have; nearest: all replicas "
            "share states out",
        ),
        (
            "megatron",
            {"sharding": "zero-3", "loops": 4, "schedule": "breadth-first"},
            "lost: layers that run 4 micro-batches before the next one (breadth-first); Megatron-LM runs one "
            "after the other; nearest: weights gathered for each of them",
        ),
    ],
)
def test_what_replicas_alone_lose(stack: str, choices: dict[str, Any], line: str) -> None:
    assert line in lost(stack, alone(**choices))


@pytest.mark.parametrize("stack", ["megatron", "accelerate"])
def test_replicas_whose_micro_batches_go_through_all_layers_lose_nothing(stack: str) -> None:
    assert lost(stack, alone(sharding="zero-3", loops=4, schedule="depth-first")) == []


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ("megatron", "lost: precision fp64, which Megatron-LM does not train in; nearest: fp32"),
        ("torchtitan", "lost: precision fp64, which torchtitan does not train in; nearest: float32"),
        ("deepspeed", "lost: precision fp64, which DeepSpeed does not train in; nearest: fp32"),
        (
            "accelerate",
            "lost: precision fp64, which Accelerate does not train in; nearest: fp32 (mixed_precision: no)",
        ),
    ],
)
def test_a_precision_that_others_do_not_train_in(stack: str, line: str) -> None:
    job = planned(run_of(precision="fp64"), dp=16)
    assert line in lost(stack, job)


def test_megatron_lm_cannot_loop_fewer_micro_batches_than_devices() -> None:
    job = planned(run_of(global_batch=8), pp=4, dp=4, loops=2, schedule="breadth-first")
    line = (
        "lost: 2 micro-batches on 4 devices in loops; Megatron-LM needs as many as devices; nearest: 4 "
        "micro-batches"
    )
    assert line in lost("megatron", job)


def test_groups_of_depth_first_are_megatron_lms_own() -> None:
    job = pipelined(schedule="depth-first", loops=2, options={"group_size": 8})
    text = emit(job, "megatron").text
    assert "--microbatch-group-size-per-virtual-pipeline-stage 8 " in text
    assert lost("megatron", job) == []


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "deepspeed", "accelerate"])
def test_unequal_shares_are_said_to_be_lost(stack: str) -> None:
    job = alone(dp=2, micro_batch_size=2)
    [stage] = job.plan.stages
    unequal = (Replica(ranks=(0,), micro_batches=20), Replica(ranks=(1,), micro_batches=12))
    plan = job.plan.model_copy(update={"stages": (stage.model_copy(update={"replicas": unequal}),)})
    names = {"megatron": "Megatron-LM", "deepspeed": "DeepSpeed", "accelerate": "Accelerate"}
    line = (
        f"lost: replicas take 20, 12 micro-batches; {names.get(stack, stack)} gives all of them equally "
        f"many; "
        "nearest: 16 each, global batch 64"
    )
    assert line in lost(stack, PlannedJob(run=job.run, problem=job.problem, plan=plan))


def test_stages_that_differ_are_said_to_be_lost() -> None:
    job = pipelined()
    first, second, *rest = job.plan.stages
    wider = tuple(Replica(ranks=(rank, rank + 1), micro_batches=32) for rank in (0, 2))
    stages = (
        first.model_copy(update={"replicas": wider}),
        second.model_copy(update={"recompute": "full"}),
        *rest,
    )
    plan = job.plan.model_copy(update={"stages": stages})
    lines = lost("megatron", PlannedJob(run=job.run, problem=job.problem, plan=plan))
    assert lines == [
        "lost: stages have 2, 4, 4, 4 replicas; Megatron-LM has as many of every stage; nearest: 4 of "
        "every stage",
        "lost: replicas have 1, 2 ranks; Megatron-LM has one degree for all; nearest: tensor degree 1",
        "lost: stages recompute full, none; Megatron-LM recomputes alike in all; nearest: full in all",
        *lines[3:],
    ]


@pytest.mark.parametrize("on", ["16xa100-80gb+4xa100-80gb", "4xa100-80gb+16xa100-80gb"])
def test_nodes_of_several_sizes_start_as_many_ranks_as_they_have_devices(on: str) -> None:
    job = planned(run_of(on=on, global_batch=80), dp=20)
    [line] = [text for text in emit(job, "megatron").text.splitlines() if text.startswith("torchrun ")]
    ranks = []
    for node in range(3):
        command = f'torchrun() {{ echo "$4"; }}; NODE_RANK={node}; {line.rstrip(chr(92))}'
        ranks.append(int(subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout))
    assert ranks == ([8, 8, 4] if on.startswith("16") else [4, 8, 8])
    assert " --nnodes 3 " in line
    assert lost("megatron", job) == []
    assert "--num_gpus" not in emit(job, "deepspeed").launch
    line = "torchrun on each node, with its own --nproc-per-node"
    assert any(line in one for one in lost("accelerate", job))


def test_micro_batches_that_cannot_fill_loops_are_written_as_the_fewest_that_can() -> None:
    job = planned(run_of(global_batch=8), pp=4, dp=4, loops=2, schedule="breadth-first")
    assert "--global-batch-size 16 " in emit(job, "megatron").text


def test_accelerates_megatron_plugin_is_told_what_it_would_take_twice_or_whole() -> None:
    """Since Accelerate 1.13 it has two context ranks, and recomputes everything, where nothing is said."""
    section = "megatron_lm_config"
    one = yaml.safe_load(emit(pipelined(), "accelerate").text)[section]
    assert one["megatron_lm_context_parallel_size"] == 1
    choices = {"dp": 2, "cp": 2, "recompute": "full"}
    two = yaml.safe_load(emit(pipelined(**choices), "accelerate").text)[section]
    assert two["megatron_lm_context_parallel_size"] == 2
    assert two["megatron_lm_recompute_granularity"] == "full"
    assert two["megatron_lm_recompute_method"] == "uniform"
    assert not any("recompute" in line for line in lost("accelerate", pipelined(**choices)))


def test_accelerate_is_told_that_processes_on_processors_belong_together() -> None:
    job = planned(run_of("gpt-1m", on="this-machine", global_batch=8, precision="fp32"), dp=2)
    emitted = emit(job, "accelerate")
    assert emitted.launch.startswith("ACCELERATE_USE_CPU=true accelerate launch ")
    assert yaml.safe_load(emitted.text)["use_cpu"] is True
    assert emit(alone(), "accelerate").launch.startswith("accelerate launch ")


@pytest.mark.parametrize(
    ("stack", "model", "line"),
    [
        (
            "megatron",
            "bert-base",
            "--emit: weft writes files of Megatron-LM for models of gpt and llama, not of bert",
        ),
        ("torchtitan", "gpt2", "--emit: weft writes files of torchtitan for models of llama, not of gpt"),
    ],
)
def test_models_that_a_stack_does_not_have_are_refused(stack: str, model: str, line: str) -> None:
    job = planned(run_of(model), dp=16)
    with pytest.raises(InputError, match=line):
        emit(job, stack)


def test_a_llama_with_biases_is_no_llama_of_a_stack(tmp_path: Path) -> None:
    preset = PRESETS["llama-7b"]
    keys = {
        "model_type": "llama",
        "num_hidden_layers": preset.layers,
        "hidden_size": preset.hidden,
        "num_attention_heads": preset.heads,
        "intermediate_size": preset.feed_forward,
        "vocab_size": preset.vocabulary,
        "max_position_embeddings": preset.sequence,
    }
    path = tmp_path / "biased.json"
    path.write_text(json.dumps(keys))
    assert emit(planned(run_of(str(path)), dp=16), "torchtitan").text
    path.write_text(json.dumps(keys | {"attention_bias": True}))
    with pytest.raises(InputError, match="torchtitan trains the plain llama, not the biases"):
        emit(planned(run_of(str(path)), dp=16), "torchtitan")


def test_accelerates_plugin_has_no_pipelines_of_images() -> None:
    job = planned(run_of("vit-base"), **PIPELINE)
    with pytest.raises(
        InputError, match="Accelerate's Megatron-LM plugin for models of gpt and llama and bert"
    ):
        emit(job, "accelerate")


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ({"dp": 1}, "NO"),
        ({}, "MULTI_GPU"),
        ({"sharding": "zero-1"}, "DEEPSPEED"),
        ({"sharding": "zero-3"}, "FSDP"),
        ({"dp": 8, "tp": 2, "sharding": "zero-3"}, "FSDP"),
        ({"dp": 8, "tp": 2}, "MEGATRON_LM"),
        (PIPELINE, "MEGATRON_LM"),
    ],
)
def test_accelerate_gets_the_plugin_that_the_plan_needs(choices: dict[str, Any], kind: str) -> None:
    assert yaml.safe_load(emit(alone(**choices), "accelerate").text)["distributed_type"] == kind


def test_torchtitan_gets_the_layers_of_every_stage() -> None:
    job = planned(run_of("llama-3-8b"), pp=4, dp=4, sharding="zero-3")
    record = tomllib.loads(emit(job, "torchtitan-toml").text)
    parts = record["parallelism"]["module_fqns_per_model_part"]
    flat = [name for part in parts for name in part]
    assert flat == ["tok_embeddings", *(f"layers.{index}" for index in range(32)), "norm", "output"]
    assert len(parts) == 4
    assert record["model"] == {"name": "llama3", "flavor": "8B", "hf_assets_path": "nobody chose it"}
    assert lost("torchtitan", job) == []


def test_torchtitan_is_configured_in_python_with_the_names_of_its_modules() -> None:
    job = planned(run_of("llama-3-8b"), pp=4, dp=4, recompute="full")
    emitted = emit(job, "torchtitan")
    compile(emitted.text, emitted.file, "exec")
    assert emitted.launch.endswith("-m torchtitan.train --module weft_torchtitan --config planned")
    assert emitted.file == "weft_torchtitan.py"
    for line in (
        "    model_spec = model_registry('8B')\n",
        # The head has another name than in the TOML of version 0.2.
        "'layers.31', 'norm', 'lm_head'],\n",
        "            local_batch_size=16,\n",
        '            max_norm=float(os.environ["CLIP_NORM"]),\n',
        # Version 0.3 refuses to record the steps of a pipeline.
        "            disable_cuda_graphs=True,\n",
        "        activation_checkpoint=FullAC.Config(),\n",
    ):
        assert line in emitted.text, line
    launch = emitted.launch_from(Path("runs/mine.py"))
    assert launch.startswith("PYTHONPATH=runs torchrun ")
    assert launch.endswith("--module mine --config planned")
    assert "disable_cuda_graphs" not in emit(planned(run_of("llama-3-8b")), "torchtitan").text


# What another stack's file says of values that nobody chose, and of those that somebody did.
PLACEHOLDERS = {
    "deepspeed": (
        ['"lr": "auto"', '"gradient_clipping": "auto"', '"weight_decay": "auto"', '"betas": "auto"'],
        ['"lr": 0.0002', '"gradient_clipping": 0.7'],
    ),
    "megatron": (
        [
            '--lr "${LEARNING_RATE:?nobody chose it}"',
            '--train-iters "${TRAIN_ITERATIONS:?nobody chose it}"',
            '--clip-grad "${CLIP_NORM:?nobody chose it}"',
            "${DATA_ARGUMENTS:?nobody chose it",
        ],
        ["--lr 0.0002", "--train-iters 77", "--clip-grad 0.7", "${DATA_ARGUMENTS:?nobody chose it"],
    ),
    "torchtitan": (
        [
            "'lr': float(os.environ[\"LEARNING_RATE\"])",
            'steps=int(os.environ["STEPS"])',
            'max_norm=float(os.environ["CLIP_NORM"])',
            'dataset=os.environ["DATASET"]',
        ],
        ["'lr': 0.0002", "steps=77", "max_norm=0.7", 'hf_assets_path=os.environ["TOKENIZER"]'],
    ),
    "torchtitan-toml": (
        [
            'hf_assets_path = "nobody chose it"',
            'lr = "nobody chose it"',
            'steps = "nobody chose it"',
            'max_norm = "nobody chose it"',
        ],
        ["lr = 0.0002", "steps = 77", "max_norm = 0.7", 'dataset = "nobody chose it"'],
    ),
}


@pytest.mark.parametrize("stack", PLACEHOLDERS)
def test_what_nobody_chose_is_a_placeholder(stack: str) -> None:
    nobody, somebody = PLACEHOLDERS[stack]
    for chosen, lines in ((False, nobody), (True, somebody)):
        run = run_of()
        if chosen:
            keys = {"optimizer": {"learning_rate": 2e-4, "clip_norm": 0.7}, "train": {"steps": 77}}
            run = changed(run, keys)
        text = emit(planned(run, dp=16), stack).text
        for line in lines:
            assert line in text
        assert "0.001" not in text


# The words for a cosine to a tenth with all that goes with it, for a constant rate, and for a linear decay.
RATES = {
    "megatron": (
        ["--lr-decay-style cosine", "--min-lr 2e-05", "--lr-warmup-iters 5"],
        ["--lr-decay-style constant"],
        ["--lr-decay-style linear"],
    ),
    "torchtitan": (
        ["warmup_steps=5, decay_type='cosine', min_lr_factor=0.1", "'betas': (0.8, 0.9)"],
        ["decay_ratio=0.0"],
        ["decay_type='linear', min_lr_factor=0.0"],
    ),
    "torchtitan-toml": (
        [
            'warmup_steps = 5\ndecay_type = "cosine"\nmin_lr_factor = 0.1\n',
            "beta1 = 0.8\nbeta2 = 0.9\nweight_decay = 0.03\n",
        ],
        ["[lr_scheduler]\ndecay_ratio = 0.0\n"],
        ['decay_type = "linear"\nmin_lr_factor = 0.0\n'],
    ),
    "deepspeed": (
        [
            '"type": "WarmupCosineLR"',
            '"total_num_steps": 77',
            '"warmup_num_steps": 5',
            '"warmup_type": "linear"',
            '"cos_min_ratio": 0.1',
        ],
        ['"type": "WarmupLR"', '"warmup_max_lr": "auto"'],
        ['"type": "WarmupDecayLR"', '"total_num_steps": "auto"'],
    ),
    "accelerate": (
        [
            "--max_steps 77",
            "--learning_rate 0.0002",
            "--lr_scheduler_type cosine",
            "--warmup_steps 5",
            "--weight_decay 0.03",
            "--adam_beta1 0.8 --adam_beta2 0.9",
        ],
        ["--lr_scheduler_type constant"],
        ["--lr_scheduler_type linear"],
    ),
}


@pytest.mark.parametrize("stack", RATES)
def test_a_chosen_learning_rate_is_written_with_its_warm_up_and_decay(stack: str) -> None:
    decaying = {
        "learning_rate": 2e-4,
        "schedule": "cosine",
        "final_learning_rate": 2e-5,
        "warm_up_steps": 5,
        "betas": [0.8, 0.9],
        "weight_decay": 0.03,
    }
    choices: tuple[dict[str, Any], ...] = (
        {"optimizer": decaying, "train": {"steps": 77}},
        {"optimizer": {"schedule": "constant"}},
        {"optimizer": {"schedule": "linear"}},
    )
    for chosen, words in zip(choices, RATES[stack], strict=True):
        text = emit(planned(changed(run_of(), chosen), dp=16), stack).text
        assert [word for word in words if word not in text] == []
    untold = emit(planned(run_of(), dp=16), stack)
    assert not any(word in untold.text + untold.launch for word in ("decay", "warm")) or stack == "deepspeed"


@pytest.mark.parametrize(
    ("stack", "table", "line"),
    [
        ("torchtitan", {"decay_steps": 50}, "decay_steps 50: torchtitan decays until the last step"),
        ("accelerate", {"decay_steps": 50}, "decay_steps 50, which the Trainer is not told"),
        ("deepspeed", {"final_learning_rate": 1e-5}, "final_learning_rate 1e-05 of a linear decay"),
    ],
)
def test_decays_that_a_stack_lacks_are_lost(stack: str, table: dict[str, float], line: str) -> None:
    run = changed(run_of(), {"optimizer": {"schedule": "linear"} | table})
    assert any(line in one for one in lost(stack, planned(run, dp=16)))


def test_a_script_with_a_placeholder_ends_with_its_name() -> None:
    text = emit(planned(run_of(), dp=16), "megatron").text
    environment = {"PATH": os.environ["PATH"]}
    ended = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert "TRAIN_ITERATIONS: nobody chose it" in ended.stderr


def test_islands_have_a_name_elsewhere() -> None:
    job = alone(sharding="zero-3", island=8)
    assert "mics_shard_size" not in json.loads(emit(job, "deepspeed").text)["zero_optimization"]
    assert "--num-distributed-optimizer-instances 2 " in emit(job, "megatron").text
    parallelism = tomllib.loads(emit(job, "torchtitan-toml").text)["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == 8
    assert parallelism["data_parallel_replicate_degree"] == 2


@pytest.mark.parametrize("stack", sorted(set(EMITTERS) - {"deepspeed", "device-map"}))
def test_files_with_comments_say_which_plan_they_are_and_what_is_lost(stack: str) -> None:
    emitted = emit(pipelined(schedule="zb-h1"), stack)
    for line in (f"weft plan {pipelined(schedule='zb-h1').plan.plan_id}", *map(str, emitted.losses)):
        assert f"# {line}" in emitted.text
    assert f"# start: {emitted.launch}\n" in emitted.text


def test_stacks_that_start_wefts_own_runtime_lose_nothing_of_the_order() -> None:
    for stack in OWN_RUNS:
        assert not any("schedule" in line for line in lost(stack, pipelined(schedule="zb-h1")))


@pytest.mark.parametrize(
    ("name", "owner"),
    [("lion.torch:Lion", "another package"), ("lamb", "weft"), ("lans", "weft"), ("muon", "weft")],
)
@pytest.mark.parametrize("stack", ["deepspeed", "megatron", "torchtitan", "torchtitan-toml"])
def test_an_optimizer_that_stacks_lack_is_lost_aloud(stack: str, name: str, owner: str) -> None:
    run = run_of("llama-3-8b")
    job = planned(run, dp=16, sharding="zero-3")
    told = f"lost: optimizer {name} of {owner}; nearest: AdamW"
    assert told not in lost(stack, job)
    other = with_optimizer(job, name=name)
    assert told in lost(stack, other)
    assert emit(other, stack).text.replace(f"# {told}\n", "") == emit(job, stack).text


@pytest.mark.parametrize("stack", ["deepspeed", "megatron", "torchtitan", "torchtitan-toml"])
def test_offload_is_lost_aloud(stack: str) -> None:
    job = planned(run_of("llama-3-8b"), dp=16, sharding="zero-3")
    moved = (Choice(name="offload", options={"states": True}),)
    other = replace(job, plan=job.plan.model_copy(update={"methods": moved}))
    told = [line for line in lost(stack, other) if line not in lost(stack, job)]
    assert [line.startswith("lost: offload of optimizer states or activations; ") for line in told] == [True]


@pytest.mark.parametrize(
    ("stack", "choices", "losses"),
    [
        ("megatron", {"blocking": ("gathers", "messages", "reductions")}, ()),
        ("megatron", {"blocking": ("gathers", "messages")}, ()),
        ("megatron", {"blocking": ("gathers", "reductions"), "pp": 1, "dp": 16}, ()),
        ("deepspeed", {"blocking": ("gathers", "messages", "reductions")}, ()),
        ("deepspeed", {"blocking": ("gathers", "reductions"), "pp": 1, "dp": 16}, ()),
        ("deepspeed", {"blocking": ("gathers",), "pp": 1, "dp": 16, "sharding": "zero-2"}, ()),
        (
            "deepspeed",
            {"blocking": ("gathers", "reductions"), "pp": 1, "dp": 16, "sharding": "zero-3"},
            (),
        ),
        (
            "deepspeed",
            {"blocking": ("messages",), "pp": 1, "dp": 16},
            ("blocking messages, which DeepSpeed",),
        ),
        ("accelerate", {"blocking": ("messages",)}, ()),
        ("accelerate", {"blocking": ("reductions",)}, ("blocking reductions, which the Megatron-LM plugin",)),
        ("torchtitan", {"blocking": ("messages",)}, ("blocking messages, which torchtitan does not have",)),
    ],
)
def test_what_is_waited_for_is_written_or_lost(
    stack: str, choices: dict[str, Any], losses: tuple[str, ...]
) -> None:
    job = pipelined(**choices)
    emitted = emit(job, stack)
    said = [str(loss) for loss in emitted.losses if "blocking" in loss.what]
    assert len(said) == len(losses)
    for line, start in zip(said, losses, strict=True):
        assert line.startswith(f"lost: {start}")
        assert line.endswith("; nearest: communication beside computations")
    if not losses:
        found = read_configuration(emitted.text, emitted.file).layout.blocking
        assert found == choices["blocking"]
