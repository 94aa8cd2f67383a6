"""Laws of clipping in every order: split backward passes, and several stages on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, legal_devices, legal_stages, schedule_layout
from program.mutations import without_edge

from weft.errors import InputError
from weft.methods.micro_batch_clipping.kinds import (
    BOUND_GRADIENT,
    BOUND_KINDS,
    BOUND_STAGE,
    CLIP_GRADIENT,
    CLIP_KINDS,
    CLIP_STAGE,
    TAKE_GRADIENT,
)
from weft.methods.micro_batch_clipping.program import Clipped
from weft.program.build import build_training_program
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, KINDS
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import ComputeOrder, Options, Pipeline
from weft.program.schedules.zb_h1 import ZeroBubbleH1
from weft.program.verify import require_valid, verify

ORDERS = ("1f1b", "gpipe", "depth-first", "breadth-first", "hybrid", "zb-h1", "zb-v")
OWN_KINDS = (TAKE_GRADIENT, *CLIP_KINDS, *BOUND_KINDS)


def built(
    schedule: str,
    devices: int,
    stages: int,
    groups: int,
    *,
    together: int = 1,
    replicas: int = 1,
    lanes: int = 1,
    sharding: Any = "zero-0",
    by_stage: bool = False,
) -> Program:
    layout = schedule_layout(schedule, devices, stages, (groups * together,) * replicas, lanes)
    methods = {**asked(sharding, norm=True), "micro-batch-clipping": Clipped(together, 1, by_stage)}
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, int]:
    schedule = draw(st.sampled_from(ORDERS))
    devices = draw(legal_devices(schedule, 3))
    stages = draw(legal_stages(schedule, devices))
    together = draw(st.integers(1, 2))
    groups = devices * draw(st.integers(1, 2)) if schedule == "depth-first" else draw(st.integers(1, 4))
    few = ("zero-0", "zero-1", "zero-2", "zero-3") if stages <= 2 * devices else ("zero-0", "zero-1")
    program = built(
        schedule,
        devices,
        stages,
        groups,
        together=together,
        replicas=draw(st.integers(1, 2)),
        lanes=draw(st.integers(1, 2)),
        sharding=draw(st.sampled_from(few)),
        by_stage=draw(st.booleans()),
    )
    return program, together


@given(programs())
def test_a_norm_is_of_all_that_a_rank_makes(drawn: tuple[Program, int]) -> None:
    program, together = drawn
    require_valid(program)
    columns, edges = program.columns, program.edges
    of_replica = (columns.micro_batch.max() + 1) // (columns.replica.max() + 1)
    group = columns.micro_batch % of_replica // together
    weights = np.isin(columns.kind, (BACKWARD, BACKWARD_WEIGHT))
    for cut in np.flatnonzero(np.isin(columns.kind, CLIP_KINDS)).tolist():
        takes = edges.source[edges.target == cut]
        assert set(columns.kind[takes].tolist()) == {TAKE_GRADIENT}
        waited = edges.source[np.isin(edges.target, takes)]
        mine = weights & (columns.rank == columns.rank[cut]) & (group == columns.part[cut])
        if columns.kind[cut] == CLIP_STAGE:
            mine &= columns.stage == columns.stage[cut]
        assert set(waited[weights[waited]].tolist()) == set(np.flatnonzero(mine).tolist())


@pytest.mark.parametrize("by_stage", [False, True])
@pytest.mark.parametrize(("schedule", "stages"), [("zb-h1", 2), ("zb-v", 4), ("depth-first", 4)])
def test_every_edge_around_a_clipped_gradient_is_needed(schedule: str, stages: int, by_stage: bool) -> None:
    program = built(schedule, 2, stages, 2, together=2, by_stage=by_stage)
    own, edges = np.isin(program.columns.kind, OWN_KINDS), program.edges
    for edge in np.flatnonzero(own[edges.source] | own[edges.target]).tolist():
        assert verify(without_edge(program, edge)), edge


def test_stages_with_norms_of_their_own_meet_no_other_stage() -> None:
    program = built("zb-v", 2, 4, 3, replicas=2, lanes=2, by_stage=True)
    columns = program.columns
    assert not np.isin(columns.kind, (CLIP_GRADIENT, BOUND_GRADIENT)).any()
    stage_ranks: dict[int, set[int]] = {}
    for stage, rank in zip(columns.stage.tolist(), columns.rank.tolist(), strict=True):
        stage_ranks.setdefault(stage, set()).add(rank)
    for kind, ranks in ((CLIP_STAGE, 2), (BOUND_STAGE, 4)):
        rows = np.flatnonzero(columns.kind == kind)
        assert len(rows) == 16 * (3 if kind == CLIP_STAGE else 1)
        for row in rows.tolist():
            members = set(program.groups[columns.group[row]])
            assert len(members) == ranks
            assert members <= stage_ranks[int(columns.stage[row])]


def test_the_input_part_of_a_first_stage_adds_to_the_gradient() -> None:
    program = built("zb-h1", 2, 2, 3)
    columns, edges = program.columns, program.edges
    into = columns.kind[edges.target] == TAKE_GRADIENT
    inputs = edges.source[into & (columns.kind[edges.source] == BACKWARD_INPUT)]
    assert columns.stage[inputs].tolist() == [0, 0, 0]
    outof = (columns.kind[edges.source] == TAKE_GRADIENT) & (columns.kind[edges.target] == BACKWARD_INPUT)
    assert columns.stage[edges.target[outof]].tolist() == [0, 0]


def test_a_device_reduces_and_steps_no_stage_before_all_are_bounded() -> None:
    program = built("breadth-first", 2, 6, 2, replicas=2, sharding="zero-1")
    columns = program.columns
    for rank in range(program.ranks):
        [bound] = np.flatnonzero((columns.kind == BOUND_GRADIENT) & (columns.rank == rank))
        after = columns.kind[bound + 1 : program.rank_starts[rank + 1]]
        names = [KINDS[code].name for code in after.tolist()]
        assert names.count("reduce") == names.count("step") == 3
        assert "backward" not in names


class _LateWeights(ZeroBubbleH1):
    """ZB-H1 with all weight parts at the end: the first stage would mix the gradients of micro-batches."""

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        order = super().order(pipeline, device, options)
        at = np.argsort(order.kind == BACKWARD_WEIGHT, kind="stable")
        return ComputeOrder(*(column[at] for column in order))


def test_orders_that_mix_gradients_are_refused() -> None:
    layout = schedule_layout("zb-h1", 2, 2, (3,))
    with pytest.raises(InputError, match="a gradient is taken before the next one of its stage begins"):
        build_training_program(
            layout, _LateWeights(), {}, methods={**asked(), "micro-batch-clipping": Clipped(1, 1)}
        )


def test_stages_that_take_turns_in_buffers_are_refused() -> None:
    with pytest.raises(InputError, match="stages take turns in two buffers") as refused:
        built("breadth-first", 2, 6, 2, replicas=2, sharding="zero-2")
    assert "\n" not in str(refused.value)
    require_valid(built("breadth-first", 2, 4, 2, replicas=2, sharding="zero-2"))


def test_paths_through_the_same_devices_are_refused() -> None:
    with pytest.raises(InputError, match="a rank holds stages of several replicas"):
        built("chimera", 2, 2, 2)
