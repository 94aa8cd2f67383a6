"""Laws: every program keeps its values whole, no broken one does, and this holds for kinds of others, too."""

from __future__ import annotations

from dataclasses import replace
from graphlib import CycleError

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from program.hazards import hazards
from program.layouts import asked, pipelines, schedule_layout, training_program
from program.mutations import moved, swap, twice, with_edge, with_row, without_edge, without_row

from weft.methods.tying.program import TiedWeights
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.checks.values import check_values
from weft.program.fold import fold_lanes
from weft.program.kinds import BACKWARD, FORWARD, KINDS, STEP, Kind
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.values import PER_MICRO_BATCH, PER_STAGE, VALUES, Read, ValueKind
from weft.program.verify import verify


@st.composite
def programs(draw: st.DrawFn, max_devices: int = 3) -> Program:
    """Every schedule, sharding, number of replicas and loops, with what passes may add."""
    name, devices, stages, micro_batches, lanes = draw(pipelines(max_devices))
    sharding = draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]))
    if sharding in ("zero-2", "zero-3"):
        micro_batches = micro_batches[:1] * len(micro_batches)
    layout = schedule_layout(name, devices, stages, micro_batches, lanes)
    what = draw(st.sampled_from(["plain", "tied", "frozen", "islands", "evaluation"]))
    tied = [TiedWeights((0, stages - 1), 96)] if what == "tied" and stages > 1 else []
    if what == "frozen":
        layout = replace(layout, frozen_stages=draw(st.integers(0, stages - 1)))
    island = None
    if what == "islands" and sharding != "zero-0" and layout.replicas > 1:
        island = draw(st.sampled_from([1, layout.replicas]))
    methods = asked(
        sharding,
        island=island,
        blocking=draw(st.sampled_from([(), ("messages",), ("reductions",)]))
        if sharding in ("zero-0", "zero-1")
        else (),
        norm=draw(st.booleans()),
        tied=tied,
    )
    if what == "evaluation":
        return build_evaluation_program(layout, methods=methods)
    only_replica = draw(st.sampled_from([None, 0]))
    return build_training_program(layout, get_schedule(name), {}, methods=methods, only_replica=only_replica)


@settings(max_examples=100)
@given(programs(max_devices=4))
def test_every_program_keeps_its_values_whole(program: Program) -> None:
    # Looped orders that exchange in turn wait for themselves.
    assert {problem.where for problem in verify(program)} <= {"deadlock"}
    assert check_values(fold_lanes(program)) == []


@given(programs(max_devices=2))
def test_the_oracle_finds_no_fault_with_any_program(program: Program) -> None:
    assume(not verify(program))
    assert hazards(program) == set()


@settings(max_examples=150)
@given(programs(max_devices=2), st.data())
def test_what_may_go_wrong_is_refused(program: Program, data: st.DataObject) -> None:
    """An instruction or edge removed, doubled or moved: whatever the oracle fears, the verifier names."""
    row = data.draw(st.integers(0, len(program) - 1))
    start, end = program.rank_starts[program.columns.rank[row] :][:2].tolist()
    change = data.draw(st.sampled_from(["no row", "no edge", "twice", "moved", "swapped", "no edges into"]))
    edges = program.edges
    if change == "no row":
        broken = without_row(program, row)
    elif change == "no edge" and len(edges):
        broken = without_edge(program, data.draw(st.integers(0, len(edges) - 1)))
    elif change == "twice":
        broken = twice(program, row)
    elif change == "moved":
        broken = moved(program, row, data.draw(st.integers(start, end - 1)))
    elif change == "swapped":
        broken = swap(program, row, data.draw(st.integers(start, end - 1)))
    else:
        kept = edges.target != row
        broken = replace(
            program,
            edges=Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept]),
        )
    try:
        feared = hazards(broken)
    except CycleError:
        assert verify(broken)
        return
    if feared:
        text = "\n".join(str(problem) for problem in check_values(broken))
        assert any(repr(value) in text for value in feared)


# What follows is written as by somebody who adds a method: kinds and values of their own, and nothing else.


@pytest.fixture
def curvature(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Codes of kinds that make a factor of what forwards save and use it up, now or in the next step."""
    monkeypatch.setattr(KINDS, "_kinds", list(KINDS._kinds))
    monkeypatch.setattr(KINDS, "_codes", dict(KINDS._codes))
    monkeypatch.setattr(VALUES, "_values", dict(VALUES._values))
    VALUES.register(ValueKind(name="factor", scope=PER_STAGE, until="freed", accumulates=True))
    VALUES.register(ValueKind(name="inverse", scope=PER_STAGE, until="written"))
    VALUES.register(ValueKind(name="sketch", scope=PER_MICRO_BATCH, until="read"))
    kinds = (
        Kind(name="curvature", symbol="C", stream="compute", reads=("saved",), writes=("factor",)),
        Kind(name="curvature_beside", symbol="D", stream="side", reads=("saved",), writes=("factor",)),
        Kind(name="invert", symbol="V", stream="compute", reads=(Read("factor", consumes=True),)),
        Kind(name="refresh", symbol="H", stream="side", writes=("inverse",)),
        Kind(name="apply_inverse", symbol="P", stream="compute", reads=("inverse",)),
        Kind(name="sketch", symbol="K", stream="compute", writes=("sketch",)),
    )
    return {kind.name: KINDS.register(kind) for kind in kinds}


def row_of(program: Program, text: str) -> int:
    return next(entry.position for entry in program.of_rank(0) if str(entry) == text)


def with_kind(program: Program, kind: int, like: str, before: str) -> Program:
    """One instruction more on rank 0, with the coordinates of `like`, issued next before `before`."""
    return with_row(program, row_of(program, like), row_of(program, before), kind=kind)


def joined(program: Program, *pairs: tuple[str, str], distance: int = 0) -> Program:
    for source, target in pairs:
        rows = row_of(program, source), row_of(program, target)
        program = with_edge(program, *rows)
        program.edges.distance[-1] = distance
    return program


def texts(program: Program) -> list[str]:
    return [str(problem) for problem in verify(program)]


def one_stage() -> Program:
    """F0.0 B0.0 F0.1 B0.1 O0 on one rank."""
    return training_program("1f1b", 1, 1, (2,))


def with_factors(codes: dict[str, int], kind: str = "curvature") -> Program:
    """Both micro-batches add to the factor, before the backward that uses up what was saved."""
    program = one_stage()
    symbol = KINDS[codes[kind]].symbol
    for micro_batch in range(2):
        program = with_kind(program, codes[kind], f"F0.{micro_batch}", f"B0.{micro_batch}")
        program = joined(program, (f"F0.{micro_batch}", f"{symbol}0.{micro_batch}"))
    return program


def inverted(program: Program, codes: dict[str, int], *makers: str) -> Program:
    program = with_kind(program, codes["invert"], "O0", "O0")
    return joined(program, *((maker, "V0") for maker in makers))


def test_an_unknown_kind_at_its_place_passes(curvature: dict[str, int]) -> None:
    program = inverted(with_factors(curvature), curvature, "C0.0", "C0.1")
    words = " ".join(str(entry) for entry in program.of_rank(0))
    assert words == "F0.0 C0.0 B0.0 F0.1 C0.1 B0.1 V0 O0"
    assert texts(program) == []
    assert hazards(program) == set()


def test_it_is_refused_after_the_backward_that_consumes_what_it_reads(curvature: dict[str, int]) -> None:
    program = inverted(with_factors(curvature), curvature, "C0.0", "C0.1")
    late = swap(program, row_of(program, "C0.0"), row_of(program, "B0.0"))
    assert texts(late) == ["values: rank 0 C0.0 reads 'saved' after rank 0 B0.0 has consumed it"]


def test_it_is_refused_before_the_forward_that_makes_what_it_reads(curvature: dict[str, int]) -> None:
    program = inverted(with_factors(curvature), curvature, "C0.0", "C0.1")
    early = without_edge(program, len(program.edges) - 4)
    early = swap(early, row_of(early, "C0.0"), row_of(early, "F0.0"))
    assert texts(early) == ["values: rank 0 C0.0 reads 'saved' before rank 0 F0.0 makes it"]


def test_its_read_needs_an_edge(curvature: dict[str, int]) -> None:
    program = inverted(with_kind(one_stage(), curvature["curvature"], "F0.0", "B0.0"), curvature, "C0.0")
    assert texts(program) == [
        "values: rank 0 C0.0 does not wait for rank 0 F0.0, which makes its 'saved'",
    ]


def test_beside_the_computations_the_backward_must_wait_for_it(curvature: dict[str, int]) -> None:
    program = with_factors(curvature, "curvature_beside")
    program = inverted(program, curvature, "D0.0", "D0.1")
    assert texts(program) == [
        f"values: rank 0 B0.{index} does not wait for rank 0 D0.{index}, which reads 'saved'"
        for index in range(2)
    ]
    assert texts(joined(program, ("D0.0", "B0.0"), ("D0.1", "B0.1"))) == []


def test_what_it_adds_up_must_be_used_up_once_and_whole(curvature: dict[str, int]) -> None:
    program = with_factors(curvature)
    assert texts(program) == ["values: nothing consumes the 'factor' that rank 0 C0.1 makes"]
    assert texts(inverted(program, curvature, "C0.1")) == [
        "values: rank 0 V0 does not wait for rank 0 C0.0, which makes its 'factor'"
    ]
    whole = inverted(program, curvature, "C0.0", "C0.1")
    early = swap(whole, row_of(whole, "V0"), row_of(whole, "C0.1"))
    assert "values: nothing consumes the 'factor' that rank 0 C0.1 makes" in texts(early)
    again = with_row(whole, row_of(whole, "V0"), row_of(whole, "O0"), kind=curvature["invert"], part=1)
    assert "values: rank 0 V0 reads 'factor' after rank 0 V0 has consumed it" in texts(again)


def test_a_value_made_twice_or_never_read_is_refused(curvature: dict[str, int]) -> None:
    program = with_kind(one_stage(), curvature["sketch"], "F0.0", "B0.0")
    unread = "values: nothing reads the 'sketch' that rank 0 K0.0 makes"
    assert texts(program) == [unread]
    again = with_row(program, row_of(program, "K0.0"), row_of(program, "B0.0"), part=1)
    overwritten = "values: rank 0 K0.0 makes 'sketch' again before anything has read that of rank 0 K0.0"
    assert texts(again) == [unread, unread, overwritten]


def test_a_value_of_the_step_before_needs_an_edge_between_cycles(curvature: dict[str, int]) -> None:
    """P0 of a step reads what H0 has made beside the step before, which must wait for P0 in turn."""
    program = with_kind(one_stage(), curvature["apply_inverse"], "O0", "O0")
    assert texts(program) == []
    program = with_kind(program, curvature["refresh"], "O0", "O0")
    assert texts(program) == [
        "values: rank 0 P0 does not wait for rank 0 H0, which makes its 'inverse'",
        "values: rank 0 H0 does not wait for rank 0 P0, which reads 'inverse'",
    ]
    assert texts(joined(joined(program, ("P0", "H0")), ("H0", "P0"), distance=1)) == []
    alone = without_row(program, row_of(program, "P0"))
    assert texts(alone) == ["values: nothing reads the 'inverse' that rank 0 H0 makes"]


def test_backwards_consume_what_forwards_save_where_stages_are_trained() -> None:
    program = one_stage()
    kinds = program.columns.kind
    assert np.count_nonzero(kinds == FORWARD) == np.count_nonzero(kinds == BACKWARD) == 2
    gone = without_row(program, row_of(program, "B0.1"))
    assert "values: nothing consumes the 'saved' that rank 0 F0.1 makes" in texts(gone)
    owed = replace(gone.obligations, step=gone.obligations.step[:0])
    untrained = [str(problem) for problem in check_values(replace(gone, obligations=owed))]
    assert not any("'saved' that" in text for text in untrained)
    assert (kinds == STEP).sum() == 1


def test_what_adds_to_a_value_that_has_been_read_is_named() -> None:
    layout = schedule_layout("1f1b", 1, 1, (2,))
    program = build_training_program(layout, get_schedule("1f1b"), {}, methods=asked(norm=True))
    early = swap(program, row_of(program, "N0"), row_of(program, "B0.1"))
    assert "values: rank 0 B0.1 adds to 'weight_gradient' after rank 0 N0 has read it" in texts(early)


def test_weights_gathered_into_a_buffer_that_still_holds_them_are_named() -> None:
    program = training_program("depth-first", 2, 8, (4, 4), sharding="zero-3")
    held = next(row for row, code in enumerate(program.columns.kind.tolist()) if KINDS[code].name == "free")
    found = texts(without_row(program, held))
    assert any("makes 'gathered_weights' again while nothing has ended that of" in text for text in found)
