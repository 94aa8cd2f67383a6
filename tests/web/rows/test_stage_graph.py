"""The stages of a plan as a graph, in words that its prediction bears out."""

from __future__ import annotations

import numpy as np
import pytest
from web.plans import branches, two_stages

from weft.planning.compile import pipeline_layout
from weft.planning.planned_job import PlannedJob
from weft.program.kinds import COMPUTATIONS
from weft.timeline.figures import peak_in_flight
from weft.web.rows.stage_graph import StageDiagram, stage_graph


def found() -> StageDiagram:
    graph = stage_graph(branches())
    assert graph is not None
    return graph


def test_a_chain_has_no_graph() -> None:
    assert stage_graph(two_stages()) is None


def test_edges_are_those_of_messages_and_the_longest_path_has_fewer_stages() -> None:
    job, graph = branches(), found()
    assert graph.edges == tuple(sorted(pipeline_layout(job.plan, job.problem.job.graph).edges))
    assert len(graph.nodes) == len(job.plan.stages)
    assert max(graph.to_end) < len(graph.nodes)
    assert all(graph.to_end[one] > graph.to_end[other] for one, other in graph.edges)


def test_reasons_are_those_of_the_program_and_of_its_prediction() -> None:
    job, graph = branches(), found()
    ranks = [stage.replicas[0].ranks[0] for stage in job.plan.stages]
    of_rank, busy_ns = peak_in_flight(job.program), busy(job)
    held = [of_rank[rank] for rank in ranks]
    for index, (node, rank) in enumerate(zip(graph.nodes, ranks, strict=True)):
        assert (node.lines[0], node.lines[2]) == (f"stage {index}", f"rank {rank}")
        assert node.memory == job.prediction.peak_bytes[rank] / job.memory_bytes[rank]
        assert node.work == pytest.approx(busy_ns[rank] / max(busy_ns))
        words = node.reasons[2]
        assert f"keeps up to {held[index]} micro-batch" in words
        readers = [reader for stage, reader in graph.edges if stage == index]
        if readers:
            most = max(readers, key=held.__getitem__)
            assert words.endswith(f"stage {most}, which reads it, {held[most]}")
        else:
            assert words.endswith("no stage reads it")
    slowest = [index for index, node in enumerate(graph.nodes) if "the slowest stage" in node.reasons[1]]
    assert slowest == [max(range(len(ranks)), key=lambda stage: busy_ns[ranks[stage]])]


def busy(job: PlannedJob) -> list[int]:
    """The nanoseconds of every rank's passes in a step."""
    timeline = job.predicted.simulation.timeline
    passes = np.isin(timeline.kind, COMPUTATIONS)
    lengths = (timeline.end_ns - timeline.start_ns)[passes]
    return [int(lengths[timeline.rank[passes] == rank].sum()) for rank in range(job.plan.ranks)]
