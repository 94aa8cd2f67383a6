"""What Calculon is told, what its answers mean, and what it cannot say; small scripts stand for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.peer_programs.blocks import DEVICES, INSIDE, layout, question
from benchmarks.peer_programs.stand_ins import ANSWER, calculon, says, writing

from benchmarks.peer_programs.calculon import Calculon, Said
from benchmarks.peer_programs.calculon_files import PUBLISHED, Tiers, application, execution, system, tiers_of
from benchmarks.peer_programs.program import PeerProgram
from weft.describe.cluster import Link
from weft.errors import InputError, RunError
from weft.planning.problem import problem_of


def test_what_it_is_told_of_a_plan() -> None:
    given = layout(
        pp=2,
        dp=2,
        tp=4,
        loops=2,
        micro_batch_size=3,
        schedule="depth-first",
        sharding="zero-1",
        recompute="selective",
    )
    asked = question(given, blocks=8, h=1024, heads=16, s=512, micro_batches=4)
    assert application(asked.model, asked.plan.sequence) == {
        "hidden": 1024,
        "feedforward": 4096,
        "seq_size": 512,
        "attn_heads": 16,
        "attn_size": 64,
        "num_blocks": 8,
    }
    tiers = tiers_of(given, DEVICES)
    assert tiers == Tiers(tensor=0, data=0, pipeline=1)
    told = execution(given, global_batch=24, precision="bf16", stream="gathered again", tiers=tiers)
    assert told == {
        "num_procs": 16,
        "tensor_par": 4,
        "pipeline_par": 2,
        "data_par": 2,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 0,
        "batch_size": 24,
        "microbatch_size": 3,
        "datatype": "bfloat16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": "attn_only",
        "pipeline_interleaving": 2,
        "optimizer_sharding": True,
        "tensor_par_comm_type": "rs_ag",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": True,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    whole = execution(given, global_batch=24, precision="bf16", stream="whole", tiers=tiers)
    assert {key for key in told if told[key] != whole[key]} == {"tensor_par_comm_type", "seq_par_ag_redo"}
    overlapped = execution(
        replace(given, blocking=()), global_batch=24, precision="bf16", stream="whole", tiers=tiers
    )
    assert overlapped["data_par_overlap"]


def test_what_it_is_told_of_devices_and_links() -> None:
    problem = problem_of(model="gpt2", on="16xa100-80gb", precision="fp16")
    told = system(problem.job.cluster, problem.job.cluster.groups[0], "fp16")
    assert told["matrix"]["float16"] == {
        "tflops": 312.0,
        "gflops_efficiency": [[128, 0.95], [16, 0.9], [1, 0.6], [0, 0.1]],
    }
    assert told["vector"]["float16"]["tflops"] == 78.0
    assert told["mem1"]["GBps"] == 2039.0
    assert told["mem1"]["MB_efficiency"] == [[100, 0.9], [10, 0.75], [1, 0.6], [0, 0.3]]
    inside, between = told["networks"]
    assert (inside["bandwidth"], inside["size"], inside["latency"]) == (300.0, 8, 3e-6)
    # 1,600 Gbit/s of a node are 25 GB/s for each of its devices.
    assert (between["bandwidth"], between["size"], between["latency"]) == (25.0, 16, 1e-5)
    alone = problem_of(model="gpt2", on="8xa100-80gb", precision="fp16").job.cluster
    assert system(alone, alone.groups[0], "fp16")["networks"][1]["bandwidth"] == 300.0


@pytest.mark.parametrize(
    ("degrees", "devices", "tiers"),
    [
        ((1, 8, 1), 8, Tiers(0, 0, 0)),
        ((1, 16, 1), 8, Tiers(0, 1, 1)),
        ((4, 1, 2), 8, Tiers(0, 0, 0)),
        # Some of three neighbours lie on two nodes.
        ((2, 2, 3), 8, Tiers(1, 1, 1)),
        ((4, 3, 1), 8, Tiers(0, 1, 1)),
        # All are on the one node.
        ((1, 3, 2), 8, Tiers(0, 0, 0)),
        ((1, 1, 16), 8, Tiers(1, 1, 1)),
    ],
)
def test_where_its_messages_go(degrees: tuple[int, int, int], devices: int, tiers: Tiers) -> None:
    pp, dp, tp = degrees
    given = layout(pp=pp, dp=dp, tp=tp)
    assert tiers_of(given, devices) == tiers


def test_an_answer_is_a_step_a_peak_and_causes_that_add_up(tmp_path: Path) -> None:
    (said,) = says(tmp_path, question(layout()), body=writing(ANSWER))
    assert said == Said(
        step_s=6.0,
        peak_bytes=12_000_000_000,
        breakdown={
            "compute": 3.0,
            "recompute": 0.75,
            "tensor ranks": 0.125,
            "messages": 0.0625,
            "gradients": 0.5,
            "bubble": 1.5,
            "optimizer": 0.0625,
        },
    )


def test_each_plan_has_its_own_answer_and_its_own_files(tmp_path: Path) -> None:
    """Plans that cannot be said are not asked, and keep their places."""
    body = (
        "told = json.load(open(execution))\n"
        "assert command == 'llm' and told['training']\n"
        f"answer = {ANSWER!r}\n"
        "answer['fw_time'] += told['microbatch_size']; answer['total_time'] += told['microbatch_size']\n"
        "json.dump(answer, open(stats, 'w'))\n"
    )
    sayable = [question(layout(micro_batch_size=size)) for size in (1, 2, 4)]
    other = question(layout(schedule="gpipe"))
    said = says(tmp_path, sayable[0], other, *sayable[1:], body=body)
    assert [one.step_s for one in said] == [7.0, None, 8.0, 10.0]
    assert said[1].reason
    # Where nothing can be asked nothing is started.
    assert says(tmp_path, other, body="raise SystemExit(1)")[0].reason


def test_what_it_refuses_itself_is_a_reason(tmp_path: Path) -> None:
    words = "Network tier0 isn't big enough"
    (said,) = says(tmp_path, question(layout()), body=f'print("ERROR: {words}")\nsys.exit(-1)\n')
    assert said == Said(reason=f"it says: {words}")
    (said,) = says(tmp_path, question(layout()), body="assert False, 'odd sizes'")
    assert said.reason == "it says: assertion: odd sizes"
    (said,) = says(tmp_path, question(layout()), body="assert False")
    assert said.reason == "it says: an assertion of its own does not hold"
    (said,) = says(tmp_path, question(layout()), body="sys.exit(4)")
    assert said.reason == "it says: exit code 4"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "raise RuntimeError('no module')",
            "calculon: its program failed with exit code 1: RuntimeError: no mod",
        ),
        ("", "calculon: its answer cannot be read: FileNotFoundError"),
        ("open(stats, 'w').write('42 furlongs')", "calculon: its answer cannot be read: JSONDecodeError"),
        (writing([1, 2]), "calculon: its answer cannot be read: TypeError"),
        (writing({"total_time": 1.0}), "calculon: its answer cannot be read: KeyError"),
        (writing({**ANSWER, "total_time": "soon"}), "calculon: its answer cannot be read: ValueError"),
        (
            writing({**ANSWER, "total_time": -1.0}),
            "calculon: its answer cannot be right: -1 s and 1.2e+10 bytes",
        ),
        (
            writing({**ANSWER, "proc_mem_tier1_cap_req": float("nan")}),
            "calculon: its answer cannot be right: 6 s and nan bytes",
        ),
        (
            writing({**ANSWER, "total_time": 7.0}),
            "calculon: the parts of its answer add up to 6 s, not 7 s",
        ),
    ],
)
def test_an_answer_that_is_none_is_one_line(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(RunError) as caught:
        says(tmp_path, question(layout()), body=body)
    assert str(caught.value).startswith(problem)
    assert "\n" not in str(caught.value)


def test_a_folder_without_its_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no bin/calculon"):
        Calculon(program=PeerProgram(name="calculon", root=tmp_path)).say([])


def test_shares_of_ones_own_reach_its_files(tmp_path: Path) -> None:
    body = (
        "told = json.load(open(system))\n"
        f"answer = {ANSWER!r}\n"
        "inside = told['networks'][0]\n"
        "answer['proc_mem_tier1_cap_req'] = inside['bandwidth'] * inside['efficiency']\n"
        "json.dump(answer, open(stats, 'w'))\n"
    )
    asked = question(layout())
    judge = Calculon(program=calculon(tmp_path, body), shares=replace(PUBLISHED, inside=0.5))
    (said,) = judge.say([asked])
    assert said.peak_bytes == INSIDE.bytes_per_s / 1e9 / 2
    assert asked.cluster.groups[0].link == Link(300e9, 3e-6)
