"""Laws: replicas meet after steps and at resets as asked, by counted bytes; all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.mutations import without_edge, without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.plan import Choice, Plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import kept_numbers, sync_options
from weft.errors import InputError
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.kinds import RESET_ERROR, SYNCHRONISE_UPDATE
from weft.methods.cser.options import DISAGREEMENT, STALEST, CserOptions
from weft.methods.cser.traffic import message_bytes, part_sizes
from weft.methods.local_averaging.options import LEFT_OUT
from weft.planning.compile import compile_evaluation, compile_folded
from weft.planning.planned import plan_run
from weft.planning.report_sections import sections_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.kinds import STEP, is_collective
from weft.program.program import Program
from weft.program.verify import require_valid, verify

CONFIG = tiny(layers=2, tied=True)
GRAPH = layer_graph(CONFIG)
ORDERS = [("gpipe", 1, 1), ("1f1b", 2, 1), ("breadth-first", 2, 2), ("zb-h1", 2, 1)]
PAPER = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 3}
# Steps with updates, and with resets, of a cycle; and its steps.
ASKED = [
    (PAPER, [0, 1, 2], [2], 3),
    ({**PAPER, "variant": "code"}, [0, 1], [2], 3),
    ({"reset_ratio": 4.0, "every": 2}, [], [1], 2),
    ({"ratio": 8.0, "variant": "error-feedback"}, [0], [], 1),
    ({"compressor": "sign", "every": 2}, [0, 1], [1], 2),
]


def meeting(options: dict[str, Any], *order: str | int) -> Plan:
    schedule, pp, loops = order or ORDERS[1]
    plan = make_plan(CONFIG, pp=pp, dp=2, loops=loops, schedule=schedule, precision="fp32")
    return plan.model_copy(update={"sync": Choice(name="cser", options=options)})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("asked", ASKED)
def test_every_stage_meets_after_its_step_and_nowhere_else(
    asked: tuple[dict[str, Any], list[int], list[int], int], order: tuple[str, int, int]
) -> None:
    options, updates, resets, cycle = asked
    plan = meeting(options, *order)
    program = make_program(CONFIG, plan)
    require_valid(program)
    columns = program.columns
    assert program.steps_per_cycle == cycle
    rows = np.flatnonzero(
        is_collective(columns.kind) & np.isin(columns.kind, [SYNCHRONISE_UPDATE, RESET_ERROR])
    )
    steps = np.count_nonzero(columns.kind == STEP) // cycle
    for kind, iterations in ((SYNCHRONISE_UPDATE, updates), (RESET_ERROR, resets)):
        mine = columns.iteration[rows][columns.kind[rows] == kind]
        assert np.bincount(mine, minlength=cycle).tolist() == [
            steps * (step in iterations) for step in range(cycle)
        ]
    holders = [{rank for copy in stage.replicas for rank in copy.ranks} for stage in plan.stages]
    for row in rows.tolist():
        assert set(program.groups[columns.group[row]]) == holders[columns.stage[row]]


def test_an_evaluation_meets_nobody() -> None:
    program = compile_evaluation(meeting(PAPER), GRAPH)
    require_valid(program)
    assert not np.isin(program.columns.kind, [SYNCHRONISE_UPDATE, RESET_ERROR]).any()


def _first(program: Program, kind: int) -> int:
    return int(np.flatnonzero(program.columns.kind == kind)[0])


def _in_another_step(program: Program) -> Program:
    iteration = program.columns.iteration.copy()
    iteration[_first(program, RESET_ERROR)] = 0
    return replace(program, columns=replace(program.columns, iteration=iteration))


def _alone(program: Program) -> Program:
    group, row = program.columns.group.copy(), _first(program, SYNCHRONISE_UPDATE)
    group[row] = len(program.groups)
    groups = (*program.groups, (int(program.columns.rank[row]),))
    return replace(program, columns=replace(program.columns, group=group), groups=groups)


def _not_awaited(program: Program) -> Program:
    """Without the edges from a reset to what reads the weights in the next cycle."""
    row = _first(program, RESET_ERROR)
    while (reaching := np.flatnonzero((program.edges.source == row) & (program.edges.distance == 1))).size:
        program = without_edge(program, int(reaching[0]))
    return program


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda program: without_row(program, _first(program, RESET_ERROR)),
            "resets: stage 0, step 2 of replica 0",
        ),
        (
            lambda program: without_row(program, _first(program, SYNCHRONISE_UPDATE)),
            "updates: stage 0, step 0 of",
        ),
        (_in_another_step, "step 0 of replica 0 runs 1 times on rank 0, not 0"),
        (_alone, "is not with all replicas of its stage"),
        (_not_awaited, "does not wait for rank 0 RE0 of step 2, which makes its 'weights'"),
    ],
)
def test_a_program_that_meets_otherwise_is_refused(broken: Callable[[Program], Program], said: str) -> None:
    program = make_program(CONFIG, meeting(PAPER))
    assert said in "; ".join(str(one) for one in verify(broken(program)))


def test_a_report_has_the_real_ratio_and_the_last_disagreement() -> None:
    text = (
        '[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xa100-80gb"\n[goal]\ncontract = "empirical"\n'
        '[sync]\nmethod = "cser"\nratio = 32.0\n[plan]\npp = 1\ndp = 2\n[train]\nglobal_batch = 8\n'
    )
    planned = plan_run(parse_run(parse_toml(text, "run")))
    metrics = [{"step": step, LEFT_OUT: 0.0} for step in range(40)]
    for step, apart in ((15, 9.0), (31, 4.0)):
        metrics[step] |= {DISAGREEMENT: apart, STALEST: float(step)}
    [rows] = [dict(one.rows) for one in sections_of(planned, metrics) if one.name == "cser"]
    assert rows["resets in the steps shown"] == "2"
    assert float(rows["bytes of all weights over those sent in a mean step"]) == pytest.approx(32.0, rel=0.01)
    assert rows["distance of replicas from their mean, at the last reset"] == "2"
    assert rows["most steps between two meetings of a block"] == "31"


@given(
    st.sampled_from([{}, {"variant": "code"}, {"order": "shuffled"}, {"compressor": "top-k"}]),
    st.floats(1.0, 5000.0),
)
def test_a_ratio_alone_is_shared_between_updates_and_resets(options: dict[str, str], ratio: float) -> None:
    if options.get("variant") == "code" and options.get("compressor"):
        return
    found = CserOptions(ratio=ratio, **options).ratios
    assert found.update is not None
    assert found.reset is not None
    assert 1.0 / found.update + 1.0 / (found.reset * found.every) == pytest.approx(1.0 / ratio)
    # A reset sends no number twice, so that updates send more at the smallest ratios.
    assert found.update <= 2.0 * ratio * (1.0 + 1e-6)
    if found.reset > 1.0:
        assert found.update == pytest.approx(2.0 * ratio)
        assert found.every == pytest.approx(found.update / found.reset)


@pytest.mark.parametrize(
    ("given_keys", "found"),
    [
        ({"ratio": 32.0}, (64.0, 4.0, 16)),
        ({"ratio": 256.0}, (512.0, 8.0, 64)),
        ({"ratio": 1024.0}, (2048.0, 2048.0 / 128, 128)),
        ({"ratio": 32.0, "reset_ratio": 8.0}, (64.0, 8.0, 8)),
        ({"ratio": 32.0, "every": 4}, (64.0, 16.0, 4)),
        ({"ratio": 32.0, "update_ratio": 128.0}, (128.0, 128.0 / 3 / 11, 11)),
        ({"ratio": 32.0, "reset_ratio": 8.0, "every": 4}, (None, 8.0, 4)),
        ({"ratio": 32.0, "reset_ratio": 8.0, "every": 8}, (64.0, 8.0, 8)),
        ({"ratio": 32.0, "update_ratio": 64.0, "reset_ratio": 8.0, "every": 8}, (64.0, 8.0, 8)),
        ({"reset_ratio": 8.0, "every": 8}, (None, 8.0, 8)),
        ({"ratio": 8.0, "variant": "error-feedback"}, (8.0, None, 1)),
    ],
)
def test_keys_leave_the_others_the_rest_of_the_ratio(
    given_keys: dict[str, Any], found: tuple[float | None, float | None, int]
) -> None:
    ratios = CserOptions(**given_keys).ratios
    assert tuple(ratios) == pytest.approx(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "ratio: missing; or give update_ratio, reset_ratio and every"),
        ({"ratio": 0.5}, "ratio: 0.5: must be greater than or equal to 1"),
        ({"ratio": 32.0, "every": 0}, "every: 0: must be greater than or equal to 1"),
        ({"update_ratio": 8.0}, "reset_ratio: missing; without resets replicas drift apart"),
        ({"reset_ratio": 8.0}, "every: missing"),
        (
            {"ratio": 32.0, "update_ratio": 16.0},
            "ratio: 32: the other keys send more or less than this ratio",
        ),
        ({"ratio": 32.0, "reset_ratio": 2.0, "every": 2}, "the other keys send more or less"),
        (
            {"ratio": 32.0, "variant": "code", "keep_errors": True},
            "keep_errors: variant 'code' has no errors",
        ),
        (
            {"ratio": 32.0, "variant": "code", "compressor": "top-k"},
            "compressor: variant 'code' averages weights",
        ),
        ({"ratio": 32.0, "compressor": "top-k", "block": 8}, "block: top-k has no blocks; leave it out"),
        ({"ratio": 32.0, "compressor": "sign", "every": 4}, "ratio: signs have one bit for each weight"),
        ({"compressor": "sign"}, "every: missing"),
        ({"ratio": 8.0, "variant": "error-feedback", "every": 4}, "every: error feedback has no resets"),
        (
            {"ratio": 8.0, "variant": "error-feedback", "update_ratio": 8.0},
            "update_ratio: error feedback has one",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        sync_options("cser", options)
    [line] = refused.value.violations
    assert said in str(line)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sharding": "zero-1"}, "zero-1: replicas that step by themselves share nothing out"),
        (
            {"sync": Choice(name="cser", options={**PAPER, "block": 10**6})},
            "a ratio of 8 keeps none of 1 blocks",
        ),
        ({"sync": Choice(name="cser", options={"ratio": 10.0**6, "every": 8})}, "nearest valid: a ratio of"),
        ({"sync": Choice(name="cser", options={**PAPER, "every": 5000})}, "at most 4096"),
    ],
)
def test_plans_that_do_not_go_together_are_refused_in_one_line(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_program(CONFIG, meeting(PAPER).model_copy(update=change))
    [line] = refused.value.violations
    assert said in str(line)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("dp = 1", "one replica has nobody to average with"),
        ('dp = 2\n[train]\nglobal_batch = 8\nprecision = "fp16"', "have no common factor of their losses"),
    ],
)
def test_runs_that_do_not_go_together_are_refused(keys: str, said: str) -> None:
    text = (
        '[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xv100-16gb"\n[goal]\ncontract = "empirical"\n'
        f'[sync]\nmethod = "cser"\nratio = 8.0\n[plan]\npp = 1\n{keys}\n'
    )
    with pytest.raises(InputError, match=said):
        plan_run(parse_run(parse_toml(text, "run")))


def test_a_step_of_a_whole_and_a_folded_program_take_the_same_time() -> None:
    cluster = parse_cluster("4xa100-80gb")
    model, plan = CostModel(graph=GRAPH, cluster=cluster), meeting(PAPER)
    whole = predict(model, plan, make_program(CONFIG, plan))
    folded = predict(model, plan, compile_folded(plan, GRAPH, cluster))
    assert folded.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-6)


@given(st.integers(1, 10**6), st.floats(1.0, 2000.0), st.sampled_from([2, 4, 8]))
def test_messages_have_the_bytes_of_what_they_carry(numbers: int, ratio: float, element: int) -> None:
    blocks = Blocks.of(numbers, ratio, None)
    sent = message_bytes(CserOptions(variant="error-feedback", update_ratio=ratio), numbers, ratio, element)
    if blocks.admit(ratio):
        real = blocks.count / blocks.kept(ratio)
        assert real == pytest.approx(ratio, rel=0.5 if numbers < 16 * ratio else 1 / 15)
        assert sent == pytest.approx(
            numbers * element / real, rel=1 / blocks.count, abs=element * blocks.length
        )
    signs = message_bytes(CserOptions(compressor="sign", every=2), numbers, 1.0, element)
    assert numbers / 8 <= signs <= numbers / 8 + 1 + 4 * (numbers / 4096 + 1)


def test_rows_have_the_bytes_of_both_parts_of_a_stage() -> None:
    plan = meeting(PAPER)
    columns = make_program(CONFIG, plan).columns
    for stage, of in enumerate(plan.stages):
        sizes = part_sizes(GRAPH, of.layers, plan.shape(stage))
        # A stage's own weights, and its copy of the embedding.
        assert len(sizes) == 2
        for kind, ratio in ((SYNCHRONISE_UPDATE, 8.0), (RESET_ERROR, 2.0)):
            expected = sum(message_bytes(CserOptions(**PAPER), size, ratio, 4) for size in sizes)
            found = columns.bytes[(columns.kind == kind) & (columns.stage == stage)]
            assert set(found.tolist()) == {expected}
            assert expected == pytest.approx(4 * sum(sizes) / ratio, rel=0.05)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (PAPER, 1 / 8),
        ({**PAPER, "variant": "code"}, 0.0),
        ({**PAPER, "keep_errors": True}, 2.0),
        ({"ratio": 8.0, "variant": "error-feedback"}, 2.0),
    ],
)
def test_ranks_keep_errors_only_where_they_need_them(options: dict[str, Any], numbers: float) -> None:
    assert kept_numbers(Choice(name="cser", options=options), 2) == numbers
