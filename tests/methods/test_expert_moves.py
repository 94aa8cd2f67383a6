"""Laws: exchanges make ranks more equal and move nothing in vain; unequal ranks cost what their rows cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described_decoders import described
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.added_layers import trained_graph
from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.expert_balance.imbalance import step_with, with_busiest
from weft.methods.expert_balance.places import busiest, first_places, swap, swaps
from weft.methods.expert_balance.program import mixtures
from weft.methods.expert_balance.relocation import expert_bytes, relocation
from weft.methods.expert_balance.report import SECTION
from weft.moves.layout import build_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem, problem_of
from weft.predict.predict import predict
from weft.program.arrays import Floats, Ints

EXPERTS, RANKS, BLOCKS = 8, 4, 4
LAYOUT = Layout(pp=2, dp=1, ep=RANKS, loops=1, micro_batch_size=4, schedule="gpipe")
# Of 32 experts' worth of tokens, the first rank has half.
SKEWED = [8.0, 8.0, *[16.0 / 6] * 6]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Floats, Ints]:
    """Tokens of experts, and places to which some exchanges have brought them."""
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    loads = draw(st.lists(st.integers(0, 50), min_size=ranks * slots, max_size=ranks * slots))
    (places,) = first_places(1, ranks * slots, ranks)
    columns = [draw(st.permutations(range(ranks))) for _ in range(slots)]
    return np.array(loads, dtype=np.float64), np.take_along_axis(places, np.array(columns).T, axis=0)


def after_all(loads: Floats, places: Ints) -> Ints:
    moved = places.copy()
    for one in swaps(loads, places):
        swap(moved, one)
    return moved


@given(placed())
def test_every_exchange_leaves_its_pair_fewer_tokens_at_most(case: tuple[Floats, Ints]) -> None:
    loads, places = case
    now = places.copy()
    for one in swaps(loads, places):
        pair = [one.rank, one.other]
        before = loads[now[pair]].sum(axis=1)
        assert before[0] == loads[now].sum(axis=1).max()
        swap(now, one)
        assert loads[now[pair]].sum(axis=1).max() < before[0]
    assert busiest(loads, now) <= busiest(loads, places)
    # An expert keeps its slot, on whichever rank.
    assert np.array_equal(np.sort(now, axis=0), np.sort(places, axis=0))


@given(placed())
def test_nothing_is_left_to_exchange_at_the_end(case: tuple[Floats, Ints]) -> None:
    loads, places = case
    moved = after_all(loads, places)
    assert swaps(loads, moved) == []
    most = loads[moved].sum(axis=1)
    rank = int(most.argmax())
    for other in set(range(len(moved))) - {rank}:
        for slot in range(moved.shape[1]):
            one = moved.copy()
            one[[rank, other], slot] = one[[other, rank], slot]
            assert loads[one[[rank, other]]].sum(axis=1).max() >= most[rank]


def test_equal_experts_stay_and_two_busy_ones_part() -> None:
    (places,) = first_places(1, EXPERTS, RANKS)
    assert swaps(np.ones(EXPERTS), places) == []
    assert swaps(np.zeros(EXPERTS), places) == []
    assert busiest(np.zeros(EXPERTS), places) == 1.0
    loads = np.array(SKEWED)
    assert busiest(loads, places) == pytest.approx(2.0)
    assert len(swaps(loads, places)) == 1
    assert busiest(loads, after_all(loads, places)) == pytest.approx((8 + 16 / 6) / 8)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folder = tmp_path_factory.mktemp("mixture")
    # Wide enough for products to take longer than their launches.
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    described(folder, "mixtral", num_local_experts=EXPERTS, max_position_embeddings=1024, **sizes)
    choice = Choice(name="expert-balance", options={"balance": "global-batch", "move_every": 10})
    found = problem_of(model=str(folder), on="8xa100-40gb", global_batch=64, launch="captured")
    graph = trained_graph(found.model, [choice])
    return replace(found, job=replace(found.job, graph=graph, methods=(choice,)))


def job_of(problem: Problem, **decided: Any) -> PlannedJob:
    plan = build_plan(problem.job, replace(LAYOUT, **decided), [1.0] * len(problem.job.graph.layers))
    run: Any = SimpleNamespace()
    return PlannedJob(run=run, problem=problem, plan=plan)


def routed_flops(graph: LayerGraph, plan: Plan) -> float:
    return sum(one.flops(plan.shape(0)) for layer in graph.layers for one in layer.routed)


@given(factor=st.floats(1.0, 8.0))
def test_a_busier_rank_computes_exchanges_and_keeps_more(problem: Problem, factor: float) -> None:
    graph, plan = problem.job.graph, job_of(problem).plan
    shape, places = plan.shape(0), mixtures(graph)
    changed = with_busiest(graph, dict.fromkeys(places, factor))
    assert changed.fingerprint == graph.fingerprint
    more = (factor - 1.0) * routed_flops(graph, plan)
    for passes in ("forward", "backward_input", "backward_weight"):
        before, after = (
            sum(getattr(layer, passes).flops(shape) for layer in one.layers) for one in (graph, changed)
        )
        assert after == pytest.approx(before + more)
    for place in places:
        was, now = graph.layers[place], changed.layers[place]
        assert now.dispatched(shape) == pytest.approx(factor * was.dispatched(shape))
        assert now.kept(shape) == pytest.approx(was.kept(shape) + (factor - 1) * was.routed_kept(shape))
        assert was.routed_kept(shape) < was.kept(shape)
    assert [one for one in graph.layers if one not in changed.layers] == (
        [] if factor == 1.0 else [graph.layers[place] for place in places]
    )


def test_shared_experts_are_as_busy_on_all_ranks(tmp_path: Path) -> None:
    described(tmp_path, "qwen2_moe", shared_expert_intermediate_size=48, moe_intermediate_size=24)
    found = problem_of(model=str(tmp_path), on="2xt4", global_batch=4)
    graph, experts = found.job.graph, found.model.architecture.experts
    assert experts is not None
    place = mixtures(graph)[0]
    layer, busy = graph.layers[place], with_busiest(graph, {place: 3.0}).layers[place]
    shape = Shape(2, found.job.sequence)
    assert all(one in layer.forward.matmuls for one in layer.routed)
    # Of the choice of tokens, and not of the shared expert, which is as wide as two of them.
    routed = sum(one.flops(shape) for one in layer.routed) * experts.active / (experts.active + 2)
    assert busy.forward.flops(shape) == pytest.approx(layer.forward.flops(shape) + 2 * routed)


def test_a_graph_keeps_the_rows_of_its_experts_in_its_file(problem: Problem) -> None:
    graph = problem.job.graph
    again = LayerGraph.from_json(graph.to_json())
    for one, other in zip(graph.layers, again.layers, strict=True):
        assert (one.routed, one.routed_share) == (other.routed, other.routed_share)
        assert one.routed_kept == other.routed_kept


def test_a_step_of_equal_ranks_is_as_predicted_and_others_are_longer(problem: Problem) -> None:
    job = job_of(problem)
    places = mixtures(problem.job.graph)
    equal = step_with(job, dict.fromkeys(places, 1.0))
    assert equal == predict(problem.cost_model, job.plan, job.program).prediction.step_s
    steps = [step_with(job, dict.fromkeys(places, factor)) for factor in (1.0, 1.5, 2.0, 4.0)]
    assert steps == sorted(steps)
    assert steps[-1] > 1.1 * steps[0]
    # One busy layer costs less than all.
    assert equal < step_with(job, {places[0]: 4.0}) < steps[-1]


def test_a_relocation_is_priced_by_what_it_moves(problem: Problem) -> None:
    job, graph = job_of(problem), problem.job.graph
    places = first_places(BLOCKS, EXPERTS, RANKS)
    even = [1.0] * EXPERTS
    assert relocation(job, np.array([even] * BLOCKS), places) is None
    found = relocation(job, np.array([even, SKEWED, even, even]), places)
    assert found is not None
    assert {mixture: len(each) for mixture, each in found.swaps.items()} == {1: 1}
    assert (found.busiest, found.busiest_after) == pytest.approx((1.25, (3 + (8 + 16 / 6) / 8) / 4))
    layers = mixtures(graph)
    step_s = step_with(job, {layers[1]: 2.0})
    assert found.saved_s == pytest.approx(step_s - step_with(job, {layers[1]: (8 + 16 / 6) / 8}))
    assert found.saved_s > 0
    # Both ways.
    size = expert_bytes(graph, job.plan, layers[1])
    assert found.moved_bytes == 2 * size
    ranks = job.plan.stages[0].replicas[0].ranks
    assert found.move_s == pytest.approx(sum(problem.cost_model.network.message_s(*ranks[:2], size)))
    least = found.move_s / found.saved_s
    assert found.pays(int(least) + 1)
    assert not found.pays(int(least))


def test_an_expert_has_weights_and_the_states_of_the_optimizer(problem: Problem) -> None:
    plan, graph = job_of(problem).plan, problem.job.graph
    decoder = problem.model.architecture
    assert decoder.experts is not None
    parameters = 3 * problem.model.hidden * decoder.experts.width
    # Masters and two states of AdamW, in fp32.
    assert expert_bytes(graph, plan, mixtures(graph)[0]) == parameters * 12


def test_the_report_tells_of_busy_ranks_and_moves(problem: Problem) -> None:
    job = job_of(problem)
    numbers = {"balance_loss": 1.5, "expert_violation": 3.0, "expert_variation": 0.5}
    metrics = [
        {"step": step, **numbers, "expert_loads": SKEWED * BLOCKS, "busiest_expert_rank": 2.0}
        for step in range(20)
    ]
    rows = dict(SECTION.rows(job, metrics))
    assert rows["tokens of the busiest expert rank"] == "2.00 times the mean of 4 ranks"
    places = mixtures(problem.job.graph)
    equal_s, step_s = (step_with(job, dict.fromkeys(places, factor)) for factor in (1.0, 2.0))
    assert f"{(step_s - equal_s) / step_s:.1%} of a step" in rows["unequal expert ranks, predicted"]
    chart = SECTION.chart(job, metrics)
    assert chart is not None
    assert [line.name for line in chart.curves] == ["violation", "variation", "busiest rank"]
    # Without expert ranks, nobody waits.
    alone = dict(SECTION.rows(job_of(problem, ep=1, dp=4), metrics))
    assert not {"tokens of the busiest expert rank", "unequal expert ranks, predicted"} & set(alone)
    moved = {
        "event": "experts moved",
        "step": 10,
        "swaps": 3,
        "layers": 2,
        "moved_bytes": 6144,
        "saved_s": 0.001,
        "move_s": 0.002,
        "took_s": 0.004,
        "busiest": 2.0,
        "busiest_after": 1.25,
    }
    [(name, text)] = SECTION.events([{"event": "finished", "step": 20}, moved])
    assert name == "experts moved after step 10"
    assert text == (
        "6 in 2 layers, 6.14 kB in 4.00 ms (predicted 2.00 ms); busiest rank 2.00 to 1.25; "
        "a step shorter by 1.00 ms (predicted)"
    )


def test_moves_are_asked_for_by_steps() -> None:
    text = (
        '[model]\npreset = "mixtral-1m"\n[task]\nsequence = 16\ndata = "a.txt"\n[train]\nglobal_batch = 8\n'
    )
    with pytest.raises(InputError, match=r"experts: move_every: 0"):
        parse_run(parse_toml(f"{text}steps = 2\n[experts]\nmove_every = 0\n", "run"))
