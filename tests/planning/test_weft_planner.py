"""The default planner: never worse than those it asks, on equal and on unlike devices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.cli.main import run
from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout, PartialLayout, rank_order_of
from weft.planning.compile import compile_plan
from weft.planning.long_steps import predict_long
from weft.planning.planners import Ranking, Verdict, get_planner
from weft.planning.planners.bounds import Bounds, LayerBytes
from weft.planning.planners.homogeneous import HomogeneousPlanner
from weft.planning.planners.part_clusters import beginnings_of
from weft.planning.planners.weft import WeftPlanner
from weft.planning.planners.weft import stages as stages_of
from weft.planning.planners.weft.estimates import ideal_step_s
from weft.planning.planners.weft.placement import devices_of, placements_of
from weft.planning.planners.weft.stages import Way, deal, dealt
from weft.planning.problem import problem_of
from weft.program.verify import verify

# One runner searches for all of them.
pytestmark = pytest.mark.xdist_group("weft planner")

MIXED = "2xa100-80gb+2xv100-32gb"


def posed(on: str, model: str = "gpt2", batch: int = 16, **pins):
    """A problem whose samples are so short that devices would wait for hosts without captured graphs."""
    decided, options = PartialLayout(**pins), {"sequence": 256, "precision": "fp16", "launch": "captured"}
    return problem_of(model=model, on=on, global_batch=batch, pins=decided, **options)


def best_s(name: str, problem) -> float:
    steps = [one.step_s for one in get_planner(name).search(problem).fitting]
    return min(steps)


# Its problem keeps the predictions for other planners.
@cache
def ranked(on: str, batch: int = 16) -> Ranking:
    return get_planner("weft").search(posed(on, batch=batch))


@pytest.mark.parametrize(
    ("on", "batch"),
    [(MIXED, 16), ("4xa100-80gb+4xt4", 16), ("2xv100-16gb+2xa100-80gb", 60), ("4xa100-80gb", 60)],
)
def test_no_baseline_has_a_plan_that_is_predicted_to_be_faster(on, batch):
    ranking = ranked(on, batch)
    found = ranking.fitting[0].step_s
    for name in ("amp", "megatron", "metis-form"):
        assert found <= best_s(name, ranking.problem)


@pytest.mark.parametrize("on", [MIXED, "4xa100-80gb+4xt4"])
def test_its_plans_are_what_the_verifier_accepts(on):
    fitting = ranked(on).fitting
    assert len(fitting) > 3
    for one in fitting[:6]:
        assert verify(compile_plan(one.plan, posed(on).job.graph)) == []


def test_slow_devices_that_hold_the_others_up_are_left_out():
    problem = posed("2xa100-80gb+2xt4", batch=16)
    best = get_planner("weft").search(problem).fitting[0]
    assert best.plan.ranks == 2
    alone = best_s("weft", posed("2xa100-80gb", batch=16))
    assert best.step_s == pytest.approx(alone, rel=1e-9)


def test_the_same_question_has_the_same_answer():
    one, other = ranked(MIXED), get_planner("weft").search(posed(MIXED))
    assert [str(item.layout) for item in one.candidates] == [str(item.layout) for item in other.candidates]


def test_pins_are_kept():
    ranking = get_planner("weft").search(posed(MIXED, tp=1, pp=2, micro_batch_size=2))
    assert ranking.fitting
    for one in ranking.fitting:
        layout = one.layout
        assert (layout.tp, layout.pp, layout.micro_batch_size) == (1, 2, 2)


def test_a_budget_ends_the_search_with_the_best_so_far():
    told = []
    planner = WeftPlanner(budget_s=1e-9, tell=told.append)
    ranking = planner.search(posed(MIXED))
    # The rules' plan and the layout with the least estimate; the search has time for no other.
    rules = get_planner("megatron").search(posed(MIXED)).fitting[0]
    assert len(ranking.fitting) == 2
    assert ranking.fitting[0].step_s < rules.step_s
    assert [text.startswith("best so far: ") for text in told] == [True, True]
    assert told[0].endswith(f", {rules.words}")
    assert len(ranking.candidates) > 20


class ToldError(Exception):
    """A planner has told its first answer."""


@pytest.mark.parametrize(
    ("model", "on", "sequence", "pins", "lighter"),
    [
        (
            "llama-3-405b",
            "256xh100-80gb",
            8192,
            {},
            "dp 2 x tp 8, 1f1b, micro-batch size 1, zero-1, recompute full",
        ),
        ("llama-3-405b", "128xh100-80gb", 8192, {}, "dp 1 x tp 8, 1f1b, micro-batch size 1, recompute full"),
        ("llama-7b", "8xa100-40gb", 2048, {"tp": 1, "pp": 2}, "depth-first, 8 loops"),
        (
            "llama-7b",
            "8xa100-40gb",
            2048,
            {"tp": 1, "pp": 1},
            "depth-first, 8 loops, micro-batch size 1, zero-3",
        ),
    ],
)
def test_a_first_answer_waits_for_no_search_where_the_rules_alone_do_not_fit(
    model, on, sequence, pins, lighter, monkeypatch
):
    problem = problem_of(model=model, on=on, global_batch=256, sequence=sequence, pins=PartialLayout(**pins))
    assert not get_planner("megatron").search(problem).fitting
    told = []

    def tell(text):
        told.append(text)
        raise ToldError

    monkeypatch.setattr(HomogeneousPlanner, "search", lambda planner, problem: pytest.fail("searched"))
    with pytest.raises(ToldError):
        WeftPlanner(tell=tell).search(problem)
    assert lighter in told[0]


@pytest.mark.parametrize("on", ["4xt4", "4xa100-40gb"])
def test_the_rules_find_larger_micro_batches_too_big_from_smaller_ones(on):
    problem = posed(on, model="llama-7b", batch=32)
    bounds = Bounds(problem)
    judged = get_planner("megatron").search(problem).candidates
    too_big = [one for one in judged if one.verdict is Verdict.TOO_BIG and one.plan is None]
    assert {one.layout.micro_batch_size for one in too_big} > {1, 2}
    assert not any(bounds.may_fit(one.layout) for one in too_big)


def test_more_memory_or_speed_never_make_the_best_step_longer():
    slow = parse_cluster("2xa100-40gb+2xv100-16gb")
    steps = []
    for scale in (1.0, 1.5, 3.0):
        groups = tuple(
            replace(
                group,
                device=replace(
                    group.device,
                    memory_bytes=round(group.device.memory_bytes * scale),
                    flops_per_s={key: value * scale for key, value in group.device.flops_per_s.items()},
                ),
            )
            for group in slow.groups
        )
        problem = posed("2xa100-40gb+2xv100-16gb", model="gpt2", batch=8, schedule="1f1b")
        problem = replace(problem, job=replace(problem.job, cluster=replace(slow, groups=groups)))
        steps.append(best_s("weft", problem))
    assert steps == sorted(steps, reverse=True)


@given(st.data())
def test_stages_fit_and_are_as_short_as_any_of_layers_that_are_alike(data):
    layers, stages = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 4))
    assume(stages <= layers)
    numbers = st.floats(0.1, 10.0)
    times_s = [np.full(layers, data.draw(numbers)) for _ in range(2)]
    pace = np.array(data.draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages)))[:, None]
    room = np.array(data.draw(st.lists(st.floats(1.0, 10.0), min_size=stages, max_size=stages)))
    memory = LayerBytes(
        states=np.ones(layers),
        left=np.full(layers, 0.25),
        buffers=np.zeros(layers),
        taken=np.zeros(layers),
    )
    batch = data.draw(st.integers(1, 6))

    def longest(counts):
        return max(count * times_s[pace[stage, 0]][0] for stage, count in enumerate(counts))

    def fits(counts):
        in_flight = (min(stages - stage, batch) for stage in range(stages))
        held = (count * (1 + 0.25 * kept) for count, kept in zip(counts, in_flight, strict=True))
        return all(one <= most for one, most in zip(held, room.tolist(), strict=True))

    cuts = combinations(range(1, layers), stages - 1)
    legal = [counts for cut in cuts if fits(counts := tuple(np.diff([0, *cut, layers]).tolist()))]
    kept = np.minimum(stages - np.arange(stages), batch)
    ways = [Way(times_s, [memory] * len(times_s))]
    place = np.arange(stages)
    found = deal(ways, pace, place, room, kept, batch, uneven=False)
    if not legal:
        assert found is None
        return
    assert found is not None
    assert found.layers_per_stage in legal
    assert longest(found.layers_per_stage) == pytest.approx(min(map(longest, legal)), rel=1e-6)
    assert dealt(ways, pace, place, found.layers_per_stage, found.ways, batch, uneven=False) == found


def with_every_limit(lines):
    """The stages of halving alone, which tries each limit."""
    low, high = 0.0, max(line.seconds[-1] for stage in lines for line in stage)
    counts = stages_of._greedy(lines, high)
    if len(counts) < len(lines):
        return None
    for _ in range(stages_of._HALVINGS):
        middle = (low + high) / 2.0
        found = stages_of._greedy(lines, middle)
        whole = len(found) == len(lines)
        low, high, counts = (low, middle, found) if whole else (middle, high, counts)
    return counts


@given(st.data())
def test_limits_that_are_left_out_would_change_no_stage(data):
    layers, stages, count = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4)), st.integers(0, 4)
    each = st.lists(count, min_size=layers, max_size=layers)

    def way():
        memory = LayerBytes(*[np.array(data.draw(each), dtype=float) for _ in range(4)])
        return Way([np.array(data.draw(each)) + 0.5 for _ in range(2)], [memory] * 2)

    ways = [way() for _ in range(data.draw(st.integers(1, 2)))]
    pace = np.array(data.draw(st.lists(st.integers(0, 1), min_size=stages, max_size=stages)))[:, None]
    room = np.array(data.draw(st.lists(st.integers(8, 60), min_size=stages, max_size=stages)), dtype=float)
    kept, place = np.arange(stages, 0, -1), np.arange(stages)
    assume(stages <= layers)
    found = deal(ways, pace, place, room, kept, 4, uneven=False)
    with patch.object(stages_of, "_shortest", with_every_limit):
        assert deal(ways, pace, place, room, kept, 4, uneven=False) == found


@given(st.data())
def test_no_placement_cut_or_share_beats_the_ideal_step(data):
    loops, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    stages, replicas = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    layers = stages * loops + data.draw(st.integers(0, 5))
    numbers = st.lists(st.floats(0.1, 10.0), min_size=layers, max_size=layers)
    times_s = [np.array(data.draw(numbers)) for _ in range(2)]
    batch = replicas * data.draw(st.integers(1, 6))
    layout = Layout(
        pp=stages,
        dp=replicas,
        tp=width,
        loops=loops,
        micro_batch_size=1,
        schedule="depth-first",
    )
    ranks = np.array(data.draw(st.lists(st.integers(0, 1), min_size=layout.ranks, max_size=layout.ranks)))
    ideal_s = ideal_step_s(layout, batch, times_s, ranks)
    paces = ranks.reshape(stages, replicas, width)
    slowness = np.array([times.sum() for times in times_s])
    pace = np.take_along_axis(paces, slowness[paces].argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    ways = [Way(times_s, [LayerBytes(*[np.zeros(layers)] * 4)] * len(times_s))]
    place = np.arange(stages * loops) % stages
    room, kept = np.ones(stages), np.ones(stages * loops)
    for uneven in (False, True):
        found = deal(ways, pace, place, room, kept, batch, uneven=uneven)
        assert found.pipeline_s >= ideal_s * (1 - 1e-9)
        assert sum(found.layers_per_stage) == layers


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_an_equal_pipeline_waits_for_one_loop_of_the_others(loops):
    devices, batch = 4, 8
    ways = [Way([np.full(16, 0.5)], [LayerBytes(*[np.zeros(16)] * 4)])]
    place = np.arange(devices * loops) % devices
    pace = np.zeros((devices, 1), dtype=np.int64)
    found = deal(ways, pace, place, np.ones(devices), np.ones(devices * loops), batch, uneven=False)
    assert found.pipeline_s == pytest.approx(2.0 * (batch + (devices - 1) / loops))
    layout = Layout(pp=devices, dp=1, loops=loops, micro_batch_size=1, schedule="depth-first")
    ideal_s = ideal_step_s(layout, batch, ways[0].times_s, np.zeros(devices, dtype=np.int64))
    assert ideal_s == pytest.approx(found.pipeline_s)


def test_unlike_devices_get_several_stages_each_where_that_is_faster():
    pins = {"pp": 4, "micro_batch_size": 1, "schedule": "depth-first"}
    problem = posed("2xa100-40gb+2xv100-32gb", model="llama-1b", batch=8, **pins)
    best = get_planner("weft").search(problem).fitting[0]
    assert best.layout.loops > 1
    devices = list(dict.fromkeys(stage.replicas[0].ranks[0] for stage in best.plan.stages))
    kinds = [problem.job.cluster.device_of(rank).name for rank in devices]
    counts = np.array(best.layout.layers_per_stage).reshape(best.layout.loops, 4).sum(axis=0)
    by_kind = {
        kind: [n for n, one in zip(counts.tolist(), kinds, strict=True) if one == kind] for kind in kinds
    }
    assert min(by_kind["a100-40gb"]) >= max(by_kind["v100-32gb"])
    assert verify(compile_plan(best.plan, problem.job.graph)) == []
    with_one = posed("2xa100-40gb+2xv100-32gb", model="llama-1b", batch=8, loops=1, **pins)
    assert best.step_s < best_s("weft", with_one)


def test_what_replicas_share_out_is_searched_on_unlike_devices():
    """Where states hardly fit, stages that share buffers leave room for what would be recomputed."""
    problem = posed("4xv100-16gb+4xt4", model="llama-1b", batch=32, tp=1, pp=2, micro_batch_size=1)
    layouts = {one.layout.sharding for one in get_planner("weft").search(problem).candidates}
    assert layouts == {"zero-0", "zero-1", "zero-2", "zero-3"}


def test_shares_follow_the_speed_of_replicas():
    ways = [Way([np.full(4, 1.0), np.full(4, 3.0)], [LayerBytes(*[np.zeros(4)] * 4)] * 2)]
    pace, room, kept = np.array([[0, 1]]), np.array([1.0]), np.array([1])
    found = deal(ways, pace, np.array([0]), room, kept, 16, uneven=True)
    assert found.micro_batches == (12, 4)
    equal = deal(ways, pace, np.array([0]), room, kept, 16, uneven=False)
    assert equal.micro_batches == (8, 8)
    assert found.pipeline_s < equal.pipeline_s


def test_placements_use_every_device_once():
    cluster = parse_cluster("4xa100-80gb+4xt4+2xl4")
    assert [one.ranks for one in beginnings_of(cluster)] == [10, 8, 4]
    problem = posed("4xa100-80gb+4xt4", tp=2, pp=2, dp=2)
    (layout, *_) = get_planner("weft").space(problem)
    for placement in placements_of(problem.job.cluster, 24):
        devices = devices_of(problem.job.cluster, layout, placement)
        assert devices.shape == (2, 2, 2)
        assert sorted(devices.ravel().tolist()) == list(range(8))
        order = rank_order_of(devices.ravel().tolist())
        assert order is None or sorted(order) == list(range(8))


def test_what_bounds_say_of_layers_is_what_a_stage_holds():
    problem = posed("4xa100-80gb", dp=1, pp=1, tp=1, recompute="none")
    layout = next(iter(get_planner("homogeneous").space(problem)))
    bounds = Bounds(replace(problem, memory_risk=0.5))
    memory = bounds.layer_bytes(layout)
    holding = bounds.holding(layout)
    assert memory.states.sum() == pytest.approx(holding.resident, rel=1e-6)
    freed = memory.left.sum() - np.cumsum(memory.left)
    assert memory.left.sum() + (memory.taken - freed).max() == pytest.approx(holding.activations, rel=1e-6)


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_what_layers_hold_of_equal_stages_is_what_their_device_holds(sharding, loops):
    problem = posed("2xa100-80gb", dp=2, pp=1)
    layout = Layout(
        pp=1,
        dp=2,
        loops=loops,
        micro_batch_size=1,
        schedule="depth-first",
        sharding=sharding,
    )
    bounds = Bounds(replace(problem, memory_risk=0.5))
    memory = bounds.layer_bytes(layout).of_each(loops)
    counts = np.diff(bounds._cuts(layout))
    largest = loops * np.add.reduceat(memory.buffers, np.cumsum(counts) - counts).max()
    resident = bounds.resident_bytes(layout)
    assert memory.states.sum() + largest >= resident * (1 - 1e-6)
    # Two buffers are as large as the largest stage of each, and not all as the largest.
    assert memory.states.sum() + memory.buffers.sum() <= resident * (1 + 1e-6)


def test_the_command_takes_a_budget(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    words = f"plan gpt2 --on {MIXED} --global-batch 16 --sequence 256 --precision fp16".split()
    assert run([*words, "--budget-seconds", "0.001"]) == 0
    shown = capsys.readouterr()
    assert "best so far: " in shown.err
    assert "2 simulated and fitting" in " ".join(shown.out.split())
    assert run([*words, "--budget-seconds", "-1"]) == 2
    assert "--budget-seconds: -1" in capsys.readouterr().err
    assert run([*words, "--budget-seconds", "1", "--planner", "amp"]) == 2
    assert "amp has no budget" in capsys.readouterr().err


def test_what_cannot_be_suited_is_answered_for_with_a_reason():
    ranking = get_planner("weft").search(posed("2xv100-16gb+2xt4", model="gpt-6.6b", batch=4))
    reasons = {one.verdict for one in ranking.candidates}
    assert Verdict.TOO_BIG in reasons
    assert all(one.reason for one in ranking.candidates)


def test_the_first_plan_does_not_wait_for_the_compiled_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def prepare(problem: object) -> None:
        told.append("the compiled simulator")
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.planning.planners.weft.planner.prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        WeftPlanner(tell=told.append).search(problem_of(model="gpt2", on="256xa100-80gb", global_batch=256))
    first, then = told
    assert first.startswith("best so far: ")
    assert then == "the compiled simulator"


def test_a_search_tells_the_plan_of_the_rules_first_and_the_best_last() -> None:
    told: list[str] = []
    problem = problem_of(model="gpt-10m", on="8xa100-80gb", global_batch=64)
    ranking = WeftPlanner(tell=told.append).search(problem)
    best = ranking.fitting[0]
    # The simulator ranks all, so that ties can be broken.
    assert all(one.estimate_s is None for one in ranking.fitting)
    rules = get_planner("megatron").search(problem).fitting[0]
    assert told[0].endswith(f", {rules.words}")
    assert told[-1].endswith(f", {best.words}")


def test_a_plan_that_several_planners_find_is_predicted_once() -> None:
    with patch("weft.planning.problem.predict_long", wraps=predict_long) as predicting:
        ranking = WeftPlanner().search(problem_of(model="gpt-10m", on="1xa100-80gb+1xt4", global_batch=16))
    predicted = [call.args[1].plan_id for call in predicting.call_args_list]
    assert {one.plan.plan_id for one in ranking.fitting} <= {*predicted}
    assert sorted({*predicted}) == sorted(predicted)


def test_pins_that_the_rules_do_not_know_are_searched_and_told() -> None:
    told: list[str] = []
    problem = problem_of(model="gpt-10m", on="8xa100-80gb", global_batch=64, schedule="zb-h1", pp=2)
    assert WeftPlanner(tell=told.append).search(problem).fitting
    assert told


def test_a_hundred_thousand_devices_get_a_plan_for_each_of_them():
    pins = PartialLayout(pp=1, tp=8, schedule="1f1b", loops=1, micro_batch_size=1, recompute="none")
    problem = problem_of(model="llama-3-8b", on="100000xh100-80gb", pins=pins)
    best = get_planner("weft").search(problem).fitting[0]
    assert best.plan.ranks == 100_000
    # A replica's time is that of the same replica among fewer, but for the exchange of gradients.
    few = get_planner("weft").search(problem_of(model="llama-3-8b", on="800xh100-80gb", pins=pins)).fitting[0]
    assert few.step_s <= best.step_s < 1.1 * few.step_s
