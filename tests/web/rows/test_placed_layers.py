"""The single layers of a placement: each once, one after the other on its rank, and after what it reads."""

from __future__ import annotations

import numpy as np
import pytest
from web.plans import branches, two_stages

from weft.planning.planned_job import PlannedJob
from weft.program.kinds import FORWARD
from weft.web.rows.placed_layers import placed_layers
from weft.web.rows.plan import ranks_of


@pytest.mark.parametrize("planned", [branches(), two_stages()], ids=["graph", "chain"])
def test_layers_divide_the_first_forward_pass_of_their_stage(planned: PlannedJob) -> None:
    placed, timeline = placed_layers(planned), planned.predicted.simulation.timeline
    assert len(placed.names) == len(planned.problem.job.graph.layers)
    assert placed.start_s.min() == 0.0
    for index, stage in enumerate(planned.plan.stages):
        own = np.flatnonzero(placed.stage == index)
        assert own.tolist() == sorted(stage.layers)
        assert len({*placed.lane[own].tolist()}) == 1
        # One after the other, without a gap.
        assert placed.start_s[own][1:] == pytest.approx(placed.end_s[own][:-1], abs=1e-12)
        rows = (timeline.stage == index) & (timeline.kind == FORWARD) & (timeline.rank == ranks_of(stage)[0])
        first = np.flatnonzero(rows)[timeline.start_ns[rows].argmin()]
        length_s = int(timeline.end_ns[first] - timeline.start_ns[first]) / 1e9
        assert placed.end_s[own].max() - placed.start_s[own].min() == pytest.approx(length_s, rel=1e-6)


def test_a_layer_starts_when_all_that_it_reads_have_ended() -> None:
    planned = branches()
    placed = placed_layers(planned)
    for producer, consumer in planned.problem.job.graph.edges:
        assert placed.end_s[producer] <= placed.start_s[consumer] + 1e-9


def test_lanes_and_kinds_have_names_and_parameters_are_counted() -> None:
    planned = branches()
    placed = placed_layers(planned)
    assert placed.lanes == tuple(f"rank {rank}, t4" for rank in range(4))
    seconds = np.bincount(placed.kind, weights=placed.end_s - placed.start_s)
    assert (np.diff(seconds) <= 0).all()
    graph = planned.problem.job.graph
    assert [placed.kinds[kind] for kind in placed.kind] == [layer.kind for layer in graph.layers]
    assert sum(placed.parameters) == graph.parameters()
