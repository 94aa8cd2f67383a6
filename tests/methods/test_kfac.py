"""Laws of K-FAC and of work in bubbles, in plans and programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby

import numpy as np
import pytest
from asked_methods import CLIPS
from filled_plans import fills, kfac, placed, predicted_step
from hypothesis import given, settings
from hypothesis import strategies as st
from program.mutations import moved, swap, without_edge, without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.cluster_expression import cluster_from_expression
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import RunFile, parse_run
from weft.errors import InputError
from weft.methods.bubble_filling.decide import device_work, place
from weft.methods.bubble_filling.options import OPEN, options_of, read_windows, windows_text
from weft.methods.bubble_filling.works import items_of, with_options
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.kfac.kinds import (
    CURVATURES,
    INVERSIONS,
    PRECONDITION,
    PRECONDITION_SHARDS,
    REDUCTIONS,
)
from weft.methods.kfac.linears import FACTORS, LinearLayers, Operand, read_treated, treated_in, treated_text
from weft.planning.decisions import decided_words
from weft.planning.planned import plan_run
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD, is_any_of
from weft.program.program import NONE, Program
from weft.program.verify import require_valid, verify

WORK = (*CURVATURES, *REDUCTIONS, *INVERSIONS)
GPT, LLAMA = tiny(layers=4), tiny("llama", layers=4)


def nothing_added(model: ModelConfig, plan: Plan) -> bool:
    """Whether all work finds room in the windows of all devices."""
    graph, options = layer_graph(model), options_of(plan)
    items = [items_of(plan, graph, stage) for stage in range(len(plan.stages))]
    devices = device_work(
        plan.model_copy(update={"precision": "fp32"}), lambda one: predicted_step(model, one), items
    )
    return all(place(options, one).added_s == 0 for one in devices)


ORDERS = st.sampled_from(
    [
        ("gpipe", 2, 1, 4),
        ("gpipe", 4, 1, 2),
        ("1f1b", 2, 1, 4),
        ("1f1b", 4, 1, 8),
        ("breadth-first", 2, 2, 4),
        ("depth-first", 2, 2, 4),
        ("hybrid", 2, 2, 4),
        ("zb-h1", 4, 1, 6),
        ("zb-v", 2, 2, 4),
        ("chimera", 2, 1, 4),
        ("chimera", 4, 1, 8),
    ]
)


SHARDINGS = st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])


# Replicas, and the tensor ranks of each in orders of one stage on each device.
TOGETHER = st.sampled_from([(2, 1), (1, 2), (2, 2)])


def plan_of(
    order: tuple[str, int, int, int],
    *,
    dp: int = 1,
    tp: int = 1,
    model: ModelConfig = GPT,
    **options: float | int | str,
) -> Plan:
    schedule, pp, loops, micro_batches = order
    sizes = {"pp": pp, "loops": loops, "dp": dp, "micro_batches": micro_batches}
    degrees = (tp,) * pp if loops == 1 and schedule != "chimera" and tp > 1 else ()
    plan = make_plan(model, schedule=schedule, degrees=degrees, **sizes)
    return plan.model_copy(update={"methods": (kfac(model), fills(**options))})


@given(
    ORDERS,
    st.just((1, 1)) | TOGETHER,
    st.sampled_from([GPT, LLAMA]),
    st.sampled_from(["weft", "official"]),
    st.integers(1, 6),
    SHARDINGS,
)
@settings(max_examples=25)
def test_windows_of_any_order_are_proved_and_leave_the_step_as_it_is(
    order: tuple[str, int, int, int],
    together: tuple[int, int],
    model: ModelConfig,
    placer: str,
    most_steps: int,
    sharding: str,
) -> None:
    dp, tp = together
    open_plan = plan_of(order, dp=dp, tp=tp, model=model, placer=placer, most_steps=most_steps)
    open_plan = open_plan.model_copy(update={"sharding": sharding})
    plan = placed(model, open_plan)
    program = make_program(model, plan)
    require_valid(program)
    _, before = predicted_step(model, open_plan.model_copy(update={"precision": "fp32"}))
    _, after = predicted_step(model, plan.model_copy(update={"precision": "fp32"}))
    # Sums of factors take turns with reductions and gathers, for which devices wait at both ends of a step.
    if sharding == "zero-0" and nothing_added(model, open_plan):
        assert after.step_s <= before.step_s * (1 + 1e-9)
    # Without the work it is the program of the plan that leaves its windows open.
    bare = make_program(model, open_plan)
    kept = ~is_any_of(program.columns.kind, WORK)
    for step in range(program.steps_per_cycle):
        own = kept & (program.columns.iteration == step)
        for name in ("kind", "stage", "micro_batch", "rank", "replica", "part", "peer", "bytes"):
            assert np.array_equal(getattr(program.columns, name)[own], getattr(bare.columns, name)), name


@given(ORDERS, st.data())
@settings(max_examples=20)
def test_the_verifier_misses_no_row_and_no_edge_of_the_work(
    order: tuple[str, int, int, int], data: st.DataObject
) -> None:
    plan = plan_of(order, dp=2, tp=data.draw(st.sampled_from([1, 2])))
    plan = plan.model_copy(update={"sharding": data.draw(SHARDINGS)})
    program = make_program(GPT, placed(GPT, plan))
    rows = np.flatnonzero(is_any_of(program.columns.kind, (*WORK, PRECONDITION, PRECONDITION_SHARDS)))
    row = data.draw(st.sampled_from(rows.tolist()))
    assert verify(without_row(program, row))
    edges = program.edges
    exchanged = (*REDUCTIONS, PRECONDITION_SHARDS)
    joins = is_any_of(program.columns.kind[edges.source], exchanged)
    joins |= is_any_of(program.columns.kind[edges.target], exchanged)
    edge = data.draw(st.sampled_from(np.flatnonzero(joins).tolist()))
    assert verify(without_edge(program, edge))


@pytest.mark.parametrize(("side", "passes"), [(0, (FORWARD,)), (1, (BACKWARD, BACKWARD_INPUT))])
def test_work_before_what_it_follows_is_found(side: int, passes: tuple[int, ...]) -> None:
    """Its tensors would be of the window before, or gone; its sum would be of two windows."""
    program = make_program(GPT, placed(GPT, plan_of(("gpipe", 2, 1, 4))))
    columns = program.columns
    opens = (columns.iteration == 0) & (columns.rank == 1)
    made = np.flatnonzero(opens & is_any_of(columns.kind, passes))
    rows = np.flatnonzero(opens & (columns.kind == CURVATURES[side]))
    row = next(
        int(one) for one in rows if (made[columns.micro_batch[made] == columns.micro_batch[one]] < one).all()
    )
    own = made[columns.micro_batch[made] == columns.micro_batch[row]]
    assert verify(moved(program, row, int(own[0])))
    inverse = int(np.flatnonzero((columns.rank == 1) & (columns.kind == INVERSIONS[side]))[0])
    assert verify(moved(program, inverse, int(rows[1])))


def test_each_stage_has_a_window_and_does_all_work_once() -> None:
    plan = placed(GPT, plan_of(("1f1b", 4, 1, 8), dp=2))
    program, windows = make_program(GPT, plan), read_windows(options_of(plan).windows)
    columns = program.columns
    assert program.steps_per_cycle == np.lcm.reduce([one.steps for one in windows])
    assert {one.steps for one in windows} != {1}
    for stage, window in enumerate(windows):
        repeats = program.steps_per_cycle // window.steps
        own = (columns.stage == stage) & (columns.replica == 1)
        blocks = {0: 0, 1: 2, 2: 1, 3: 1}[stage] if stage else 0
        for kind, each in ((CURVATURES[0], 8), (REDUCTIONS[1], 1), (INVERSIONS[0], 4)):
            count = int((own & (columns.kind == kind)).sum())
            assert count % (repeats * each) == 0
            assert count > 0 or blocks == 0


@given(ORDERS.filter(lambda one: one[2] == 1), st.sampled_from(["weft", "official"]), TOGETHER)
@settings(max_examples=10)
def test_inverses_of_several_ranks_follow_the_sums_of_both_sides(
    order: tuple[str, int, int, int], placer: str, together: tuple[int, int]
) -> None:
    """The damping of a factor needs the means of both, over all ranks of its stage."""
    dp, tp = (2, 1) if order[0] == "chimera" else together
    program = make_program(GPT, placed(GPT, plan_of(order, dp=dp, tp=tp, placer=placer)))
    columns, of_layers = program.columns, defaultdict[tuple[int, int], list[int]](list)
    for kind, rank, part in zip(
        *(one.tolist() for one in (columns.kind, columns.rank, columns.part)), strict=True
    ):
        if kind in REDUCTIONS:
            of_layers[rank, part].append(kind)
        elif kind in INVERSIONS:
            of_layers[rank, part // FACTORS].append(NONE)
    assert of_layers
    for kinds in of_layers.values():
        sums = [run for run in cyclic_runs(kinds, NONE.__eq__) if run[0] != NONE]
        assert sums
        assert all(sorted(run) == sorted(REDUCTIONS) for run in sums)


@given(ORDERS, st.sampled_from(["weft", "official"]), st.sampled_from([1, 2]))
@settings(max_examples=10)
def test_no_curvature_of_a_layer_comes_between_its_inverses(
    order: tuple[str, int, int, int], placer: str, tp: int
) -> None:
    """Sums of a window would hold rows of the next one, of a single rank."""
    require_apart(make_program(GPT, placed(GPT, plan_of(order, dp=2, tp=tp, placer=placer))))


def test_factors_are_added_up_over_all_ranks_of_a_stage() -> None:
    """Tensor ranks have sums of their own rows, as replicas have."""
    program = make_program(GPT, without_bubbles(plan_of(("1f1b", 2, 1, 4), dp=2, tp=2)))
    columns = program.columns
    for row in np.flatnonzero(is_any_of(columns.kind, REDUCTIONS)).tolist():
        holders = columns.rank[columns.stage == columns.stage[row]]
        assert sorted(program.groups[int(columns.group[row])]) == sorted(set(holders.tolist()))


def test_tensor_ranks_work_in_one_order() -> None:
    """They exchange rows in it."""
    program = make_program(GPT, without_bubbles(plan_of(("gpipe", 2, 1, 4), tp=2)))
    columns = program.columns
    one, other = np.flatnonzero((columns.kind == CURVATURES[0]) & (columns.rank == 1))[:2].tolist()
    assert not verify(program)
    assert any("in one order" in str(problem) for problem in verify(swap(program, one, other)))


def without_bubbles(plan: Plan) -> Plan:
    return plan.model_copy(update={"methods": plan.methods[:1]})


def test_no_curvature_comes_between_inverses_in_gaps_with_room_for_both() -> None:
    """Of the first stage, a window is one step, and its last inverse has a gap behind two backward passes."""
    model = tiny(layers=2)
    plan = make_plan(model, pp=2, dp=2, schedule="1f1b", precision="fp32")
    require_apart(
        make_program(model, placed(model, plan.model_copy(update={"methods": (kfac(model), fills())})))
    )


def cyclic_runs(values: list[int], key: Callable[[int], bool]) -> list[list[int]]:
    """The runs of a cycle's values with equal keys. A window may wrap around its end, and so may a run."""
    first = next(place for place, one in enumerate(values) if key(one) != key(values[place - 1]))
    return [[*run] for _, run in groupby(values[first:] + values[:first], key=key)]


def require_apart(program: Program) -> None:
    """On every rank, a layer's curvature of a window comes first, then all of its inverses."""
    columns, of_layers = program.columns, defaultdict[tuple[int, int], list[int]](list)
    for kind, rank, part in zip(
        *(one.tolist() for one in (columns.kind, columns.rank, columns.part)), strict=True
    ):
        if kind in (*CURVATURES, *INVERSIONS):
            inverts = kind in INVERSIONS
            of_layers[rank, part // FACTORS if inverts else part].append(inverts)
    assert of_layers
    for inverts in of_layers.values():
        runs = cyclic_runs(inverts, bool)
        assert len({len(run) for run in runs if run[0]}) == 1
        assert len({len(run) for run in runs if not run[0]}) == 1


@given(ORDERS)
@settings(max_examples=6)
def test_a_norm_is_of_the_gradient_after_the_inverses(order: tuple[str, int, int, int]) -> None:
    plan = plan_of(order, dp=2)
    program = make_program(GPT, plan.model_copy(update={"methods": (*plan.methods, *CLIPS)}))
    require_valid(program)
    kind, rank = program.columns.kind, program.columns.rank
    for norm in np.flatnonzero(kind == NORM).tolist():
        own = np.flatnonzero((kind == PRECONDITION) & (rank == rank[norm]))
        assert (own < norm).all()
    assert (kind == NORM).any()


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ("1:", "1 windows for 2 stages"),
        ("0:; 1:", "is no window of the form"),
        ("1:0.99.0.0.4; 1:", "does not do each piece"),
        ("nonsense", "is no window of the form"),
    ],
)
def test_windows_that_miss_work_are_refused(windows: str, words: str) -> None:
    plan = plan_of(("gpipe", 2, 1, 4), windows=windows)
    with pytest.raises(InputError, match=words):
        make_program(GPT, plan)


def test_windows_behind_no_computation_are_refused() -> None:
    plan = placed(GPT, plan_of(("gpipe", 2, 1, 4)))
    first, *others = read_windows(options_of(plan).windows)
    moved = first._replace(runs=(first.runs[0]._replace(behind=99), *first.runs[1:]))
    with pytest.raises(InputError, match="behind computation 99 of"):
        make_program(GPT, with_options(plan, windows=windows_text([moved, *others])))


COUNTS = st.integers(1, 9999)
OPERANDS = st.builds(
    Operand, COUNTS, st.lists(COUNTS, min_size=1, max_size=3).map(tuple), st.none() | COUNTS, st.booleans()
)
LAYERS = st.builds(LinearLayers, st.lists(OPERANDS, min_size=1, max_size=3).map(tuple))


@given(st.dictionaries(st.integers(0, 40), LAYERS, min_size=1))
def test_linear_layers_are_read_as_they_were_written(treated: dict[int, LinearLayers]) -> None:
    assert read_treated(treated_text(treated)) == treated


@pytest.mark.parametrize("text", ["", "1: 64>10", "2-1: 64>10", "1-2: 64", "1-2: x64>10", "1-2: 64>10,"])
def test_another_text_of_linear_layers_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="does not list the linear layers"):
        read_treated(text)


def test_linear_layers_that_read_one_value_have_one_factor() -> None:
    assert treated_text(treated_in(LLAMA)) == "1-4: 16>16,8,8 16/>16 16>24,24 24/>16"
    assert treated_text(treated_in(GPT)) == "1-4: 16>48 16/>16 16>24 24/>16"
    assert treated_in(resolve_model("bert-base"))[1].sizes(1) == [768, 768, 768, 768, 3072, 768]


RUN = """
[model]
preset = "gpt-1m"
[cluster]
use = "4xv100-16gb"
[train]
global_batch = 16
[goal]
contract = "empirical"
[plan]
pp = 4
micro_batch_size = 2
schedule = "1f1b"
{tables}
"""


def run_of(tables: str) -> RunFile:
    return parse_run(parse_toml(RUN.format(tables=tables), "run.toml"), "run.toml")


def test_a_run_file_asks_for_work_in_bubbles_and_the_plan_states_its_windows() -> None:
    planned = plan_run(run_of('[kfac]\ndamping = 0.01\n[bubble]\nwork = ["kfac"]\nmargin = 0.1'))
    options = options_of(planned.plan)
    assert (options.margin, options.placer) == (0.1, "weft")
    assert options.windows != OPEN
    [words] = decided_words(planned)
    assert words.startswith("bubbles: kfac in every step; ")
    assert words.endswith("it adds nothing")
    plain = plan_run(run_of(""))
    # The products with inverses are all that a step has more.
    assert planned.prediction.step_s == pytest.approx(plain.prediction.step_s, rel=0.1)
    assert max(planned.prediction.peak_bytes) > max(plain.prediction.peak_bytes)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ("[kfac]\ndamping = 0", "damping: 0: must be greater than 0"),
        ("[kfac]\nevery = 0", "every: 0"),
        ('[bubble]\nwork = ["kfac"]', "'kfac' is not asked for"),
        ('[kfac]\n[bubble]\nwork = ["kfca"]', "'kfca' is not one of evaluate, kfac"),
        ("[kfac]\n[bubble]\nwork = []", "work"),
        ('[kfac]\n[sync]\nmethod = "local-averaging"\nevery = 4', "replicas"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(tables: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        plan_run(run_of(tables))
    # One line for each layout of the search.
    assert str(refused.value.violations[0]) in str(refused.value).splitlines()


def test_ranks_may_divide_layers_and_not_tokens() -> None:
    def planned(axis: str) -> Plan:
        run = RUN.replace("pp = 4", f"pp = 2\n{axis} = 2").format(tables="[kfac]")
        return plan_run(parse_run(parse_toml(run, "run.toml"), "run.toml")).plan

    plan = planned("tp")
    assert plan.grid(0).tensor == 2
    assert not check_plan(plan, layer_graph(resolve_model("gpt-1m")), cluster_from_expression("4xv100-16gb"))
    with pytest.raises(InputError, match="kfac: cp: 2 ranks have parts of a layer's tokens"):
        planned("cp")


def test_a_plan_that_leaves_windows_open_or_lacks_the_work_is_refused() -> None:
    graph, cluster = layer_graph(GPT), cluster_from_expression("2xv100-16gb")
    plan = plan_of(("gpipe", 2, 1, 4))
    assert any("a plan states them" in str(one) for one in check_plan(plan, graph, cluster))
    alone = plan.model_copy(update={"methods": plan.methods[1:]})
    assert any("'kfac' is not asked for" in str(one) for one in check_plan(alone, graph, cluster))
