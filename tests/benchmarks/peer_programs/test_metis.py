"""What Metis is told, what its plans mean in weft, and what it cannot plan; small scripts stand for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peer_programs.stand_ins import FIRST, HEADING, SECOND, UNLIKE, metis

from benchmarks.peer_programs.metis import Metis
from benchmarks.peer_programs.metis_files import MetisInputs
from benchmarks.peer_programs.metis_plans import MetisPlan, Translation, read_plans
from benchmarks.peer_programs.program import PeerProgram
from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.layout import PartialLayout
from weft.errors import InputError, RunError
from weft.planning.planners import Verdict
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.memory import stage_kept_bytes


def posed(on: str = "4xa100-80gb+4xt4", **choices: Any) -> Problem:
    """Six layers, 16 samples to a step."""
    given = {"model": "gpt-1m", "global_batch": 16, "precision": "fp16"}
    return problem_of(on=on, **{**given, **choices})


def test_what_it_is_told_of_nodes(tmp_path: Path) -> None:
    inputs = MetisInputs(problem=posed("8xa100-80gb+16xh100-80gb+8xv100-32gb"))
    # Its four names tell kinds apart and mean nothing else: the H100 gets one that is left.
    assert inputs.labels == {"a100-80gb": "A100", "h100-80gb": "P100", "v100-32gb": "V100"}
    hosts, nodes = inputs.nodes()
    assert hosts == "node0 slots=8\nnode1 slots=8\nnode2 slots=8\nnode3 slots=8\n"
    assert nodes["node0"] == {
        "instance_type": "A100",
        "inter_bandwidth": pytest.approx(200e9 / 1.048576e9),
        "intra_bandwidth": pytest.approx(300e9 / 1.048576e9),
        "memory": 80.0,
    }
    assert [nodes[f"node{place}"]["instance_type"] for place in (1, 2, 3)] == ["P100", "P100", "V100"]


def test_kinds_with_one_name_of_its_own_get_different_ones() -> None:
    inputs = MetisInputs(problem=posed("8xa100-80gb+8xa100-40gb"))
    assert inputs.labels == {"a100-80gb": "A100", "a100-40gb": "V100"}


def test_what_it_is_told_of_layers() -> None:
    problem = posed(global_batch=12)
    inputs = MetisInputs(problem=problem, most_samples=3)
    assert inputs.most_tensor_ranks == 4
    # Of equal replicas 1, 2 and 3; unequal ones are put together from powers of two.
    assert inputs.samples == [1, 2, 3, 4, 8]
    profiles = dict(inputs.profiles())
    assert len(profiles) == 2 * 3 * 5
    assert set(profiles) >= {"DeviceType.A100_tp1_bs1.json", "DeviceType.T4_tp4_bs8.json"}
    told = profiles["DeviceType.T4_tp2_bs3.json"]
    job, shape = problem.job, Shape(3, problem.job.sequence, 2)
    times = told["execution_time"]
    expected = ProblemLayerTimes(problem).of_group(1, 3, 2).both_s
    assert times["layer_compute_total_ms"] == pytest.approx((1e3 * expected).tolist())
    assert times["forward_backward_time_ms"] == pytest.approx(1e3 * expected.sum() + 1e-3)
    # Mixed precision holds 18 bytes for each parameter.
    held = [
        18 * layer.parameters(shape) + stage_kept_bytes(job.graph, (place,), shape, "fp16")
        for place, layer in enumerate(job.graph.layers)
    ]
    assert told["execution_memory"]["layer_memory_total_mb"] == pytest.approx([one / 2**20 for one in held])
    # It reads parameters and update from any one file.
    whole = [4 * round(layer.parameters(Shape(1, job.sequence))) for layer in job.graph.layers]
    for record in profiles.values():
        assert record["model"]["parameters"]["parameters_per_layer_bytes"] == whole
        assert record["execution_time"]["optimizer_time_ms"] == times["optimizer_time_ms"] > 0.0


def test_its_files_and_arguments_lie_where_its_program_reads_them(tmp_path: Path) -> None:
    before = (
        "import json, os, sys\n"
        "told = dict(one[2:].split('=') for one in sys.argv[1:])\n"
        "assert told['gbs'] == '16' and told['num_layers'] == '6' and told['max_profiled_tp_degree'] == '4'\n"
        "assert len(open(told['hostfile_path']).readlines()) == 2\n"
        "assert len(json.load(open(told['clusterfile_path']))) == 2\n"
        "for name in os.listdir(told['profile_data_path']):\n"
        "    json.load(open(told['profile_data_path'] + '/' + name))\n"
    )
    ranking = Metis(program=metis(tmp_path, HEADING, FIRST, before=before)).search(posed())
    assert len(ranking.fitting) == 1


def test_its_plans_are_simulated_and_keep_its_order(tmp_path: Path) -> None:
    planner = Metis(program=metis(tmp_path, "chatter", "", HEADING, FIRST, SECOND, UNLIKE, "", "more"))
    ranking = planner.search(posed())
    first, second, unlike = ranking.candidates
    assert str(first.layout) == "pp 2 x dp 4, 1f1b, micro-batch size 2, layers 3+3"
    assert first.estimate_s == 12.5e-3
    assert str(second.layout) == ("pp 2 x dp 2 x tp 2, 1f1b, micro-batch size 2, layers 1+5, devices 4-7 0-3")
    for one in (first, second):
        assert one.verdict is Verdict.FITS
        assert one.plan is not None
        assert one.prediction is not None
    assert unlike.verdict is Verdict.REFUSED
    assert unlike.reason == "stages of one plan of weft have the same degrees (4 x tp 1, 2 x tp 2)"
    assert [str(layout) for layout in planner.space(posed())] == [str(first.layout), str(second.layout)]


def test_only_the_first_of_its_plans_are_looked_at(tmp_path: Path) -> None:
    printed = tmp_path / "output.txt"
    printed.write_text("\n".join([HEADING, FIRST, SECOND, "nonsense"]))
    assert [plan.cost_s for plan in read_plans(printed, 2)] == [12.5e-3, 14e-3]
    assert read_plans(printed, 1) == [
        MetisPlan(12.5e-3, ("A100", "T4"), (4, 4), ((4, 1), (4, 1)), 2, (0, 3, 6))
    ]


ONE = MetisPlan(1.0, ("A100", "T4"), (8,), ((8, 1),), 2, (0, 6))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (ONE._replace(cuts=(0, 5)), "its stages have 5 layers"),
        (
            ONE._replace(devices=(4, 4), degrees=((4, 1), (4, 1)), cuts=(0, 6, 6)),
            "its stages have 6+0 layers",
        ),
        (ONE._replace(kinds=("A100",)), "the rank order has 4 devices, the layout has 8 ranks"),
        (ONE._replace(micro_batches=3), "3 micro-batches of 0 samples on 8 replicas are not the 16 samples"),
        (
            ONE._replace(devices=(8,), degrees=((1, 8),)),
            "tp 8 does not divide 4 heads",
        ),
    ],
)
def test_what_weft_cannot_say_of_its_plans_has_a_reason(plan: MetisPlan, reason: str) -> None:
    translated = Translation(MetisInputs(problem=posed())).of(plan)
    assert translated.reason.startswith(reason)


def test_pins_hold(tmp_path: Path) -> None:
    pinned = posed(pins=PartialLayout(dp=2, tp=2, schedule="gpipe"))
    first, second = Metis(program=metis(tmp_path, HEADING, FIRST, SECOND)).search(pinned).candidates
    assert (first.layout.dp, first.verdict) == (2, Verdict.FITS)
    assert first.layout.schedule == "gpipe"
    assert second.reason == "dp 2 and tp 2 pinned"


def test_unequal_parts_of_a_micro_batch_become_shares(tmp_path: Path) -> None:
    line = "1, 9.0, [<DeviceType.A100: 'a100'>, <DeviceType.T4: 't4'>], [8], [(8, 1)], 2, [0, 14]"
    problem = posed(model="gpt2", sequence=128, global_batch=64)
    (found,) = Metis(program=metis(tmp_path, HEADING, line)).search(problem).candidates
    shares = found.layout.micro_batches_per_replica
    assert shares is not None
    assert sum(shares) == 16
    assert min(shares[:4]) > max(shares[4:])
    assert found.reason.endswith("unequal parts of a micro-batch are unequal shares of whole ones")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (("nothing",), "metis: its answer has no heading 'rank, cost, node_sequence', ..."),
        ((HEADING,), "metis: it found no plan"),
        ((HEADING, "1, 2, three"), "metis: its answer cannot be read: '1, 2, three'"),
        ((HEADING, FIRST.replace("12.5", "nan")), "metis: its answer cannot be read: "),
        ((HEADING, FIRST.replace("12.5", "soon")), "metis: its answer cannot be read: "),
        ((HEADING, FIRST.replace("[0, 3, 6]", "[0, 6]")), "metis: its answer cannot be read: "),
        ((HEADING, FIRST.replace("(4, 1), (4, 1)", "(4, 1), (4)")), "metis: its answer cannot be read: "),
        ((HEADING, FIRST.replace("(4, 1), (4, 1)", "(4, 1), (2, 1)")), "metis: its answer cannot be read: "),
        ((HEADING, FIRST.replace(", 2, [0", ", 0, [0")), "metis: its answer cannot be read: "),
        ((HEADING, "1, 2.0, [], [], [], 1, [0]"), "metis: its answer cannot be read: "),
    ],
)
def test_an_answer_that_is_none_is_one_line(tmp_path: Path, lines: tuple[str, ...], problem: str) -> None:
    with pytest.raises(RunError) as caught:
        Metis(program=metis(tmp_path, *lines)).search(posed())
    assert str(caught.value).startswith(problem)


def test_a_program_that_fails_is_one_line(tmp_path: Path) -> None:
    program = metis(tmp_path, before="raise KeyError('tp2_bs3')")
    with pytest.raises(RunError, match=r"^metis: its program failed with exit code 1: KeyError: 'tp2_bs3'$"):
        Metis(program=program).search(posed())
    with pytest.raises(InputError, match=r"has no cost_het_cluster\.py"):
        Metis(program=PeerProgram(name="metis", root=tmp_path / "bin")).search(posed())


def slower(problem: Problem) -> Problem:
    first, *rest = problem.job.cluster.groups
    groups = (replace(first, speeds=(0.5,) * first.devices), *rest)
    return _on(problem, replace(problem.job.cluster, groups=groups))


def _on(problem: Problem, cluster: Cluster) -> Problem:
    return replace(problem, job=replace(problem.job, cluster=cluster))


CANNOT = [
    (
        lambda: posed(model="alexnet-tiny", precision="fp32"),
        "it knows a chain of equal layers between a first",
    ),
    (lambda: posed(on="8xa100-80gb+4xt4"), "its nodes have equally many devices, 9 at most, not 4 and 8"),
    (lambda: posed(on="24xa100-80gb", global_batch=24), "its devices are a power of two together, not 24"),
    (
        lambda: posed(on="8xa100-80gb+8xh200-141gb+16xv100-32gb+8xh100-80gb+24xa100-40gb"),
        "it tells 4 kinds of devices apart, not 5",
    ),
    (lambda: slower(posed()), "its devices of one kind are equally fast"),
    (
        lambda: posed(pins=PartialLayout(sharding="zero-1")),
        "its replicas share nothing out, and zero-1 is pinned",
    ),
    (lambda: posed(pins=PartialLayout(recompute="full")), "it recomputes nothing, and full is pinned"),
    (lambda: posed(pins=PartialLayout(schedule="zb-h1")), "metis plans 1f1b and gpipe, not 'zb-h1'"),
]


@pytest.mark.parametrize(("problem", "reason"), CANNOT, ids=[reason[:30] for _, reason in CANNOT])
def test_what_it_cannot_plan_is_refused(tmp_path: Path, problem: Any, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        Metis(program=metis(tmp_path, HEADING, FIRST)).search(problem())
    assert reason in str(caught.value.violations[0])
