"""Laws: collectives between segments cost what they cost inside, and a broken program of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cut_programs import broken_borders, cluster, collective, cut_by, predicted, require_told, run_file
from hypothesis import given, settings
from hypothesis import strategies as st
from program.mutations import twice, without_edge, without_row
from small_plans import divisible, make_program
from tensor_plans import tensor_plan

import weft
from weft.describe.families import layer_graph
from weft.describe.plan import Recompute
from weft.describe.prediction import Prediction
from weft.errors import InputError
from weft.methods.tensor_collectives.kinds import TENSOR_BACKWARD, TENSOR_FORWARD
from weft.methods.tensor_collectives.program import NAME, WAYS
from weft.planning.compile import compile_evaluation, compile_folded
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.program import COLUMN_NAMES, Program
from weft.program.segments import BACKWARD_SEGMENT, FORWARD_SEGMENT, INPUT_SEGMENT, WEIGHT_SEGMENT
from weft.program.verify import require_valid, verify

AS_INSTRUCTIONS = WAYS[1:]
CONFIG = divisible("gpt")


run_by = partial(cut_by, name=NAME)
asking = partial(run_file, name=NAME, preset="gpt-1m", global_batch=8)


@pytest.mark.parametrize("way", AS_INSTRUCTIONS)
@pytest.mark.parametrize(
    ("family", "sequence", "options", "sharding"),
    [
        ("gpt", 8, {}, "zero-0"),
        ("llama", 7, {"pp": 2, "schedule": "1f1b"}, "zero-0"),
        ("bert", 8, {"dp": 2, "loops": 2, "schedule": "breadth-first"}, "zero-3"),
        ("vit", 7, {"dp": 2, "loops": 2, "schedule": "depth-first"}, "zero-2"),
        ("gpt", 8, {"pp": 2, "schedule": "chimera"}, "zero-1"),
        ("bert", 8, {"pp": 2, "dp": 2, "schedule": "zb-h1"}, "zero-2"),
        ("llama", 8, {"pp": 2, "loops": 2, "schedule": "zb-v"}, "zero-0"),
    ],
)
def test_programs_are_proven(family: str, sequence: int, options: dict, sharding: str, way: str) -> None:
    config = divisible(family, sequence=sequence)
    plan = tensor_plan(config, **options).model_copy(update={"sharding": sharding})
    require_valid(make_program(config, run_by(plan, way=way)))


def test_blocks_exchange_four_times_a_pass_where_ranks_divide_the_tokens_else_twice() -> None:
    for sequence, in_a_block in ((8, 4), (7, 2)):
        config = divisible("gpt", sequence=sequence)
        kinds = make_program(config, run_by(tensor_plan(config), way="instructions")).columns.kind
        blocks = in_a_block * config.layers
        # Tokens leave the table forward, and enter the head backward; both ways where ranks divide them.
        ends = 2 if sequence == 8 else 1
        for kind, passes in ((TENSOR_FORWARD, FORWARD), (TENSOR_BACKWARD, BACKWARD)):
            assert (kinds == kind).sum() == (kinds == passes).sum() * (blocks + ends)


@pytest.mark.parametrize("tp", [1, 2])
def test_plans_without_segments_compile_to_the_same_table(tp: int) -> None:
    plan = tensor_plan(CONFIG, tp=tp)
    one = make_program(CONFIG, plan)
    # One rank has nobody to exchange with, whatever it is told.
    two = make_program(CONFIG, run_by(plan, way="inside" if tp > 1 else "overlapped"))
    for name in COLUMN_NAMES:
        assert np.array_equal(getattr(one.columns, name), getattr(two.columns, name))
    assert np.array_equal(one.edges.source, two.edges.source)
    assert one.groups == two.groups


def test_an_evaluation_exchanges_inside() -> None:
    program = compile_evaluation(run_by(tensor_plan(CONFIG), way="instructions"), layer_graph(CONFIG))
    require_valid(program)
    assert not np.isin(program.columns.kind, [TENSOR_FORWARD, FORWARD_SEGMENT]).any()


def test_weight_parts_are_issued_behind_the_collective_that_they_run_beside() -> None:
    columns = make_program(CONFIG, run_by(tensor_plan(CONFIG), way="overlapped")).columns
    inputs = np.flatnonzero(columns.kind == INPUT_SEGMENT)
    assert len(inputs)
    assert (columns.kind[inputs + 1] == TENSOR_BACKWARD).all()
    assert (columns.kind[inputs + 2] == WEIGHT_SEGMENT).all()


def test_interleaved_passes_are_those_of_two_micro_batches_that_wait_for_nobody() -> None:
    plan = tensor_plan(CONFIG, schedule="1f1b", micro_batches=4)
    ordered, mixed = (make_program(CONFIG, run_by(plan, way=way)).columns for way in WAYS[1::2])
    assert sorted(ordered.kind.tolist()) == sorted(mixed.kind.tolist())
    # The first forward and the last backward have nothing beside them.
    ends = np.flatnonzero(np.isin(mixed.kind, (FORWARD, BACKWARD)) & (mixed.rank == 0))
    numbers = [(int(mixed.kind[row]), int(mixed.micro_batch[row])) for row in ends]
    assert numbers[0] == (FORWARD, 0)
    assert numbers[-1] == (BACKWARD, 3)
    second = mixed.micro_batch[(mixed.rank == 0) & (mixed.kind == FORWARD_SEGMENT)]
    assert (np.diff(second) >= 0).all()
    between = mixed.micro_batch[(mixed.rank == 0) & (mixed.micro_batch >= 0)]
    assert np.count_nonzero(np.diff(between)) > np.count_nonzero(
        np.diff(ordered.micro_batch[(ordered.rank == 0) & (ordered.micro_batch >= 0)])
    )


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *broken_borders(TENSOR_FORWARD, "tensor"),
        (lambda program: twice(program, collective(program, TENSOR_BACKWARD)), "takes part twice"),
    ],
)
def test_broken_programs_are_refused(broken: Callable[[Program], Program], said: str) -> None:
    program = make_program(CONFIG, run_by(tensor_plan(CONFIG, dp=2, micro_batches=1), way="overlapped"))
    problems = [str(one) for one in verify(broken(program))]
    assert any(said in one for one in problems), problems[:4]


@settings(max_examples=25)
@given(
    st.sampled_from(AS_INSTRUCTIONS),
    st.sampled_from([7, 8]),
    st.sampled_from([("gpipe", 1), ("zb-h1", 2)]),
    st.data(),
)
def test_any_missing_edge_or_row_is_refused(
    way: str, sequence: int, order: tuple[str, int], data: st.DataObject
) -> None:
    config, (schedule, pp) = divisible("llama", sequence=sequence), order
    plan = tensor_plan(config, schedule=schedule, pp=pp, micro_batches=2)
    program = make_program(config, run_by(plan, way=way))
    edges = np.flatnonzero(program.edges.distance == 0)
    assert verify(without_edge(program, int(data.draw(st.sampled_from(edges.tolist())))))
    assert verify(without_row(program, data.draw(st.integers(0, len(program) - 1))))


@settings(max_examples=12)
@given(
    family=st.sampled_from(["gpt", "llama", "bert", "vit"]),
    sequence=st.sampled_from([7, 8]),
    order=st.sampled_from([("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)]),
    micro_batch_size=st.integers(1, 4),
    latency_us=st.sampled_from([0, 20]),
    synchronous=st.booleans(),
)
def test_a_step_in_segments_takes_as_long_as_inside_and_beside_others_no_longer(
    family: str,
    sequence: int,
    order: tuple[str, int],
    micro_batch_size: int,
    latency_us: int,
    synchronous: bool,
) -> None:
    config, (schedule, pp) = divisible(family, sequence=sequence), order
    plan = tensor_plan(config, pp=pp, schedule=schedule, micro_batch_size=micro_batch_size)
    on = cluster(latency_us, synchronous=synchronous)
    inside, ordered, overlapped, interleaved = (
        predicted(config, run_by(plan, way=way), on).prediction.step_s for way in WAYS
    )
    # Every instruction is rounded to a tick. An embedding and a head exchange once, where two halves are
    # counted, and a loss by itself: what is launched differs, so far as an exchange of few bytes takes time.
    launched = 6 * plan.micro_batches * Network(cluster=on).all_reduce(range(2), 2).seconds
    assert ordered == pytest.approx(
        inside, abs=launched + 1e-9 * len(make_program(config, run_by(plan, way=WAYS[1])))
    )
    assert overlapped <= ordered + 1e-6
    assert interleaved <= ordered + 1e-6


@settings(max_examples=10)
@given(
    family=st.sampled_from(["gpt", "llama", "bert"]),
    sequence=st.sampled_from([7, 8]),
    pp=st.integers(1, 2),
    recompute=st.sampled_from(["full", "selective"]),
    synchronous=st.booleans(),
)
def test_a_recomputed_segment_keeps_what_crossed_its_border_and_spares_the_exchange(
    family: str, sequence: int, pp: int, recompute: Recompute, synchronous: bool
) -> None:
    config, on = divisible(family, sequence=sequence), cluster(20, synchronous=synchronous)

    def step(recompute: Recompute, way: str) -> Prediction:
        plan = tensor_plan(config, pp=pp, schedule="1f1b", recompute=recompute)
        return predicted(config, run_by(plan, way=way), on).prediction

    kept, again, inside = (
        step(*one) for one in (("none", WAYS[1]), (recompute, WAYS[1]), (recompute, WAYS[0]))
    )
    # Inside of passes, a layer that runs again exchanges again.
    assert kept.step_s < again.step_s < inside.step_s
    assert all(np.greater_equal(again.peak_bytes, inside.peak_bytes))


def test_a_segment_that_runs_again_takes_its_own_forward_pass_longer() -> None:
    """The last one has the embedding, whose forward pass is long beside its backward pass."""
    config = divisible("gpt", sequence=7)

    def backward_ticks(recompute: Recompute) -> Ints:
        plan = run_by(tensor_plan(config, pp=1, micro_batches=1, recompute=recompute), way=WAYS[1])
        columns = make_program(config, plan).columns
        rows = (columns.rank == 0) & np.isin(columns.kind, (BACKWARD, BACKWARD_SEGMENT))
        return predicted(config, plan, cluster(0)).priced.costs.occupancy[rows]

    kept, again = backward_ticks("none"), backward_ticks("full")
    longer = again / kept
    assert (longer > 1.0).all()
    assert longer[-1] > 1.05 * longer[:-1].max()


def test_a_folded_program_is_predicted_alike() -> None:
    on, graph = cluster(20), layer_graph(CONFIG)
    plan = run_by(tensor_plan(CONFIG, dp=2), way="overlapped")
    whole = predict(CostModel(graph=graph, cluster=on), plan, make_program(CONFIG, plan)).prediction
    folded = compile_folded(plan, graph, on)
    assert len(folded) * 4 == len(make_program(CONFIG, plan))
    assert not verify(folded)
    assert predict(CostModel(graph=graph, cluster=on), plan, folded).prediction.step_s == pytest.approx(
        whole.step_s
    )


def test_time_follows_the_expected_bytes_and_room_the_most() -> None:
    plan = run_by(tensor_plan(CONFIG), way="instructions")
    program = make_program(CONFIG, plan)
    columns = program.columns
    roomy = replace(program, columns=replace(columns, most_bytes=4 * columns.most_bytes))
    one, two = (
        predict(CostModel(graph=layer_graph(CONFIG), cluster=cluster(0)), plan, each)
        for each in (program, roomy)
    )
    assert one.prediction.step_s == two.prediction.step_s
    crossing = int(columns.bytes[collective(program, TENSOR_FORWARD)])
    more = np.array(two.prediction.peak_bytes) - np.array(one.prediction.peak_bytes)
    assert (more >= 3 * crossing).all()


def test_context_ranks_are_refused_in_one_line() -> None:
    plan = run_by(tensor_plan(CONFIG, tp=4), way="instructions")
    with pytest.raises(InputError) as refused:
        make_program(CONFIG, plan.model_copy(update={"mesh": {**plan.mesh, "cp": 2, "tp": 2}}))
    assert len(refused.value.violations) == 1


def test_an_unknown_way_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="nearest valid: overlapped"):
        make_program(CONFIG, run_by(tensor_plan(CONFIG), way="overlaped"))


@pytest.mark.parametrize("way", ["inside", "overlapped"])
def test_a_run_file_asks_for_it_and_its_report_says_so(tmp_path: Path, way: str) -> None:
    pins = {"pp": 1, "tp": 2, "loops": 1, "micro_batch_size": 1, "recompute": "none", "schedule": "1f1b"}
    require_told(asking(tmp_path, way, **pins), NAME, way, (TENSOR_FORWARD, TENSOR_BACKWARD))


def test_a_run_file_that_pins_context_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nearest cp: 1"):
        weft.plan(asking(tmp_path, "instructions", tp=2, cp=2))
