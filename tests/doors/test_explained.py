"""Predictions for other stacks' files, what is missing for them, and what weft would do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doors.jobs import planned, run_of

from weft.doors.emit import emit
from weft.doors.explained import explain_text
from weft.doors.implied import Answers
from weft.errors import InputError
from weft.moves.layout_of_plan import layout_of
from weft.scoring.score import score

pytestmark = pytest.mark.usefixtures("own_home")

MEGATRON = (
    "pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 8 "
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 16 "
    "--bf16 --use-distributed-optimizer --sequence-parallel --vocab-size 32000 "
)


def deepspeed(**change: Any) -> str:
    record = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    return json.dumps(record | change)


def test_a_command_line_says_all_that_a_prediction_needs() -> None:
    found = explain_text(MEGATRON, "x", Answers(on="8xa100-80gb"))
    assert found.missing == ()
    assert found.implied is not None
    assert str(found.implied.layout) == (
        "pp 2 x dp 2 x tp 2, 1f1b, micro-batch size 1, zero-1, blocking gathers and messages and "
        "reductions, layers 5+5"
    )
    record = found.record()
    predicted, weft = record["predicted"], record["weft"]
    assert predicted["step_low_s"] < predicted["step_s"] < predicted["step_high_s"]
    assert record["fits"] is True
    assert record["gain_s"] == pytest.approx(predicted["step_s"] - weft["step_s"])
    assert record["gain_s"] > 0
    assert json.dumps(record)


def test_a_wrong_batch_has_one_line_with_one_nearest_value() -> None:
    text = deepspeed(train_batch_size=100, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=8)
    found = explain_text(text, "x", Answers(model="gpt2", on="16xa100-80gb"), search=False)
    lines = [str(one) for one in found.findings if "batch" in str(one)]
    assert [line.partition("make ")[2] for line in lines] == ["512 (nearest valid: 512)"]


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "deepspeed"])
def test_what_weft_emits_is_predicted_as_it_was_planned(stack: str) -> None:
    job = planned(
        run_of("llama-1b", global_batch=32, sequence=1024),
        pp=2,
        dp=8,
        sharding="zero-1" if stack != "torchtitan" else "zero-3",
    )
    told = Answers(model="llama-1b", on="16xa100-80gb", sequence=1024)
    found = explain_text(emit(job, stack).text, "file", told, search=False)
    assert found.implied is not None
    layout, wanted = found.implied.layout, layout_of(job.plan)
    assert (layout.pp, layout.dp, layout.loops, layout.micro_batch_size) == (
        2,
        8,
        1,
        1,
    )
    assert layout.sharding == wanted.sharding
    assert found.implied.problem.job.global_batch == 32
    assert found.plan is not None
    assert found.best is None


def test_weights_that_are_shared_out_without_a_pipeline_come_layer_by_layer() -> None:
    found = explain_text(deepspeed(), "ds.json", Answers(model="gpt2", on="4xa100-80gb"), search=False)
    assert found.implied is not None
    layout = found.implied.layout
    assert (layout.schedule, layout.loops, dict(layout.options)) == ("hybrid", 14, {"depth": 2})
    assert found.implied.assumed == (
        "recompute none: the program decides it, not this file; --recompute says otherwise",
        "links inside nodes: 300 GB/s and 3.00 us per device, usual for a100-80gb",
        "sequence: 1024 tokens, the model's longest",
    )


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("bytes_per_s", [1e9, 200e9])
def test_a_file_and_a_measured_row_of_its_run_have_the_same_step(
    stage: int, bytes_per_s: float, tmp_path: Path
) -> None:
    """But for the embedding and the head, which a row has in units of blocks."""
    text = deepspeed(zero_optimization={"stage": stage, "overlap_comm": True})
    where = tmp_path / "cluster.toml"
    where.write_text(
        'name = "two"\n[[node]]\nname = "n"\ncount = 2\ndevice = "a100-80gb"\ndevices = 8\n'
        'bandwidth = "300 GB/s"\nlatency = "3 us"\n[[link]]\nbetween = ["n", "n"]\n'
        f'bandwidth = "{bytes_per_s / 1e9:g} GB/s"\nlatency = "10 us"\n'
    )
    found = explain_text(text, "ds.json", Answers(model="llama-7b", on=str(where)), search=False)
    assert found.plan is not None
    row = {
        "family": "llama",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "ffn": 11008,
        "seq": 2048,
        "cluster": "cluster.toml",
        "dp": 16,
        "micro_batch_size": 2,
        "global_batch": 64,
        "sharding": f"zero-{stage}",
        "stack": "deepspeed",
        "measured_step_s": 1.0,
    }
    path = tmp_path / "rows.csv"
    path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    assert score(path).rows[1].step_s == pytest.approx(found.plan.prediction.step_s, rel=0.03)


@pytest.mark.parametrize(("steps", "size"), [({}, 4), ({"gradient_accumulation_steps": 2}, 2)])
def test_deepspeed_divides_its_batch_among_all_devices(steps: dict[str, int], size: int) -> None:
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": None}
    text = deepspeed(**{"gradient_accumulation_steps": None} | batch | steps)
    found = explain_text(text, "ds.json", Answers(model="gpt2", on="16xa100-80gb"), search=False)
    assert found.missing == ()
    assert found.configuration.layout.micro_batch_size == size


def test_a_batch_for_fewer_devices_than_are_told_is_wrong() -> None:
    text = deepspeed(train_batch_size=16, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    found = explain_text(text, "ds.json", Answers(model="gpt2", on="16xa100-80gb"), search=False)
    line = (
        "wrong: train_batch_size: 16; train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x "
        "16 replicas make 64 (nearest valid: 64)"
    )
    assert line in map(str, found.findings)


def test_what_is_told_counts_before_what_the_file_says() -> None:
    told = Answers(
        model="gpt2", on="4xa100-80gb", global_batch=64, micro_batch_size=4, sequence=512, recompute="full"
    )
    found = explain_text(deepspeed(), "ds.json", told, search=False)
    assert found.implied is not None
    job, layout = found.implied.problem.job, found.implied.layout
    assert (job.global_batch, job.sequence, layout.micro_batch_size, layout.recompute) == (64, 512, 4, "full")


def test_told_samples_of_a_micro_batch_keep_the_accumulation_of_a_file() -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 4\n"
        "deepspeed_config: {gradient_accumulation_steps: 8, zero_stage: 1}\n"
    )
    answers = Answers(model="gpt2", on="4xa100-80gb", micro_batch_size=2)
    found = explain_text(text, "a.yaml", answers, search=False)
    assert found.configuration.samples_per_step == 64


@pytest.mark.parametrize("option", ["micro_batch_size", "global_batch", "sequence"])
@pytest.mark.parametrize("count", [0, -1, 10**12])
def test_an_answer_that_is_no_count_is_refused(option: str, count: int) -> None:
    with pytest.raises(
        InputError, match=f"^--{option.replace('_', '-')}: {count}; allowed: counts from 1 to"
    ):
        explain_text(deepspeed(), "ds.json", Answers(on="4xa100-80gb", **{option: count}))


def test_recomputation_and_sharding_that_memory_does_not_need_are_found() -> None:
    told = Answers(model="gpt2", on="4xa100-80gb", recompute="full")
    lines = [str(one) for one in explain_text(deepspeed(), "ds.json", told, search=False).findings]
    assert lines[0].startswith("wasteful: recompute: full: ")
    assert "of memory stay free without it, and a step takes " in lines[0]
    assert lines[0].endswith(" less (nearest valid: none)")


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    found = explain_text(
        deepspeed(zero_optimization={"stage": 0}),
        "ds.json",
        Answers(model="llama-7b", on="8xa100-80gb"),
        search=False,
    )
    assert found.overfull_bytes > 0
    assert found.gain_s is None
    assert found.record()["fits"] is False


def test_a_layout_that_cannot_run_is_a_finding() -> None:
    told = Answers(model="gpt2", on="8xa100-80gb", sequence=1023)
    found = explain_text(deepspeed(sequence_parallel_size=2), "ds.json", told, search=False)
    assert found.plan is None
    assert [str(one) for one in found.findings] == [
        "wrong: sequence_parallel_size: 1023 tokens are no multiple of 2 x cp = 4 (nearest valid: 1)",
        "wrong: DeepSpeed: cp 2: sequence 1023 is not a multiple of 2 x cp = 4; nearest sequence: 1020",
    ]


@pytest.mark.parametrize(
    ("text", "told", "lines"),
    [
        (
            deepspeed(),
            Answers(on="4xa100-80gb"),
            ["DeepSpeed: the file does not say the model's sizes; give --model, a preset or a folder"],
        ),
        (
            "base_model: my/own-model\nmicro_batch_size: 1\n",
            Answers(on="4xa100-80gb"),
            ["Axolotl: the sizes of 'my/own-model' are not known; give --model, a preset or a folder"],
        ),
        (
            deepspeed(train_batch_size=None, train_micro_batch_size_per_gpu=None),
            Answers(model="gpt2", on="4xa100-80gb"),
            ["DeepSpeed: the file does not say the samples of a micro-batch; give --micro-batch-size"],
        ),
        (
            "distributed_type: FSDP\nnum_processes: 100000\n",
            Answers(model="gpt2"),
            ["Accelerate: the file is for 100000 devices, this machine has "],
        ),
        (
            "distributed_type: FSDP\nnum_processes: 16\n",
            Answers(model="gpt2", on="8xa100-80gb"),
            [
                "Accelerate: the file is for 16 devices, 8xa100-80gb has 8; give --on "
                "(nearest valid: --on 16xa100-80gb)"
            ],
        ),
        (
            MEGATRON.replace("-parallel-size 2", "-parallel-size 3"),
            Answers(on="16xa100-80gb"),
            ["devices: 16 are no multiple of pp 3 x tp 3 = 9 (nearest valid: 18)"],
        ),
    ],
)
def test_what_is_missing_is_asked_for_by_the_option(text: str, told: Answers, lines: list[str]) -> None:
    found = explain_text(text, "file", told, search=False)
    assert found.plan is None
    assert len(found.missing) == len(lines)
    assert all(str(one).startswith(line) for one, line in zip(found.missing, lines, strict=True))


def test_a_launch_on_fewer_devices_than_are_told_is_taken_to_all_of_them() -> None:
    text = f"torchrun --nproc-per-node 8 {MEGATRON}"
    found = explain_text(text, "x", Answers(on="16xa100-80gb"), search=False)
    assert found.implied is not None
    assert found.implied.layout.dp == 4
    assert found.implied.assumed[0] == "all 16 devices of --on; the file starts 8"


def test_a_batch_and_a_sharding_that_nobody_says_are_assumed_aloud() -> None:
    text = "base_model: gpt2\nmicro_batch_size: 1\ndeepspeed: own.json\nbf16: true\nsequence_len: 512\n"
    found = explain_text(text, "a.yml", Answers(on="4xa100-80gb"), search=False)
    assert found.implied is not None
    assert found.implied.assumed[0] == "sharding zero-0: the file does not say it"
    text = "distributed_type: FSDP\nmixed_precision: bf16\n"
    found = explain_text(
        text, "a.yaml", Answers(model="gpt2", on="4xa100-80gb", micro_batch_size=1), search=False
    )
    assert found.implied is not None
    assert found.implied.assumed[0] == (
        "global batch 4: one micro-batch per replica; --global-batch says otherwise"
    )


def test_what_the_trainer_puts_in_place_of_auto_is_assumed_aloud() -> None:
    text = deepspeed(train_micro_batch_size_per_gpu="auto")
    found = explain_text(text, "ds.json", Answers(model="gpt2", on="4xa100-80gb"), search=False)
    assert found.implied is not None
    assert found.implied.layout.micro_batch_size == 8
    assert found.implied.assumed[0] == "micro batch size 8: what an untold Trainer puts in place of auto"
    told = Answers(model="gpt2", on="4xa100-80gb", micro_batch_size=2)
    found = explain_text(text, "ds.json", told, search=False)
    assert found.implied is not None
    assert found.implied.layout.micro_batch_size == 2


def test_another_job_than_the_predicted_one_gets_no_verdict() -> None:
    told = Answers(model="gpt2", on="4xa100-80gb", recompute="full")
    found = explain_text(deepspeed(optimizer={"type": "OneBitAdam"}), "ds.json", told)
    assert found.configuration.incomparable[0].startswith("optimizer.type OneBitAdam")
    assert found.plan is not None
    assert (found.best, found.gain_s) == (None, None)
    assert found.record()["not_comparable"] == list(found.configuration.incomparable)
    # Advice that rests on the prediction is left out, too; the same file without it has some.
    assert found.findings == ()
    assert explain_text(deepspeed(), "ds.json", told, search=False).findings != ()


def test_a_schedule_that_weft_does_not_know_is_assumed_aloud() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 1024
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Zigzag"
"""
    found = explain_text(text, "job.toml", Answers(on="8xa100-80gb"), search=False)
    assert found.implied is not None
    assert "schedule 1f1b: the file's is not one that weft knows" in found.implied.assumed


def test_a_step_of_too_many_passes_is_not_simulated() -> None:
    text = deepspeed(gradient_accumulation_steps=10**6, zero_optimization={"stage": 0})
    found = explain_text(text, "ds.json", Answers(model="gpt2", on="4xa100-80gb"), search=False)
    assert found.plan is None
    assert str(found.findings[-1]) == (
        "wrong: DeepSpeed: 1000000 micro-batches of stages are too many to simulate; at most 200000 "
        "(nearest valid: a smaller global batch)"
    )


def test_a_model_of_more_layers_than_any_is_not_priced() -> None:
    found = explain_text(
        MEGATRON.replace("--num-layers 8", "--num-layers 5000"), "x", Answers(on="8xa100-80gb")
    )
    assert "give --model" in str(found.missing[0])


def test_a_model_that_a_file_names_is_never_imported() -> None:
    text = "base_model: os:system\nmicro_batch_size: 1\n"
    found = explain_text(text, "a.yml", Answers(on="4xa100-80gb"))
    assert "os:system" in str(found.missing[0])


def test_a_model_that_is_told_and_unknown_is_refused() -> None:
    with pytest.raises(InputError, match="'gpt22' is neither a preset"):
        explain_text(deepspeed(), "ds.json", Answers(model="gpt22"))


def test_many_micro_batches_without_a_pipeline_are_predicted() -> None:
    """The rounds of such a step are as many as its micro-batches, however many these are."""
    seconds = []
    for micro_batches in (32, 64):
        record = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
        }
        told = Answers(model="llama-1b", on="2xa100-80gb", sequence=1024)
        explanation = explain_text(json.dumps(record), "file", told, search=False)
        assert not [one for one in explanation.findings if str(one).startswith("wrong")]
        assert explanation.plan is not None
        seconds.append(explanation.plan.prediction.step_s)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.05)


def test_an_adapter_is_predicted_with_its_frozen_layers() -> None:
    text = (
        "base_model: NousResearch/Meta-Llama-3-8B\ndatasets: [{path: mine}]\nsequence_len: 4096\n"
        "micro_batch_size: 1\ngradient_accumulation_steps: 4\nbf16: true\n"
    )
    adapter = "adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_linear: true\n"
    whole, low_rank, packed = (
        explain_text(text + more, "config.yml", Answers(on="1xa100-80gb"), search=False)
        for more in ("", adapter, adapter.replace("lora\n", "qlora\nload_in_4bit: true\n", 1))
    )
    assert whole.overfull_bytes > 0 > low_rank.overfull_bytes > packed.overfull_bytes
    assert whole.plan is not None
    assert low_rank.plan is not None
    assert packed.plan is not None
    assert low_rank.plan.prediction.step_s < packed.plan.prediction.step_s
    assert low_rank.plan.prediction.step_s < whole.plan.prediction.step_s
    assert dict(packed.plan.plan.method("lora").options)["base"] == "nf4"


def test_states_of_few_bits_are_predicted_as_they_are() -> None:
    text = (
        "base_model: NousResearch/Meta-Llama-3-8B\ndatasets: [{path: mine}]\nsequence_len: 4096\n"
        "micro_batch_size: 1\nbf16: true\noptimizer: "
    )
    plain, few = (
        explain_text(text + name, "config.yml", Answers(on="8xa100-80gb"), search=False)
        for name in ("adamw_torch", "adamw_bnb_8bit")
    )
    assert plain.implied is not None
    parameters = plain.implied.problem.job.graph.parameters()
    saved = plain.overfull_bytes - few.overfull_bytes
    # Two states of one byte in place of two in fp32.
    assert saved == pytest.approx(6 * parameters, rel=0.04)
