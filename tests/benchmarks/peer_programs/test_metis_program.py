"""Metis' own program against its closed form, on equal devices with equal links everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.peer_programs.clones import program
from oracles import metis as oracle

from benchmarks.peer_programs.metis import Metis
from weft.describe.amount import Shape
from weft.describe.cluster import Link
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem, problem_of

LINK = Link(12e9, 1e-5)


def equal() -> Problem:
    """Its program takes the links inside nodes for those between them, so that they are the same here."""
    problem = problem_of(model="gpt2", on="16xt4", global_batch=96, sequence=256, precision="fp16")
    (group,) = problem.job.cluster.groups
    cluster = replace(
        problem.job.cluster,
        groups=(replace(group, link=LINK, count=16 // group.devices, devices=group.devices),),
        links={(group.name, group.name): LINK},
    )
    return replace(problem, job=replace(problem.job, cluster=cluster))


def test_costs_of_its_plans_are_those_of_the_closed_form() -> None:
    problem = equal()
    job, times = problem.job, ProblemLayerTimes(problem)
    (group,) = job.cluster.groups
    layers = len(job.graph.layers)
    estimated = [
        one
        for one in Metis(program=program("metis")).search(problem).candidates
        if one.estimate_s is not None
    ]
    chosen = np.random.Generator(np.random.Philox(key=1)).permutation(len(estimated))[:20].tolist()
    for place in chosen:
        layout, estimate_s = estimated[place].layout, estimated[place].estimate_s
        size, tp = layout.micro_batch_size, layout.tp
        counts = layout.layers_per_stage or (layers,)
        micro_batches = job.global_batch // (layout.dp * size)
        # It counts elements as bytes, and a cut before the last layer sends what that one makes.
        sent = [size * job.sequence * problem.model.hidden] * layers
        sent[-2] = size * job.sequence * problem.model.vocabulary / tp
        form_s = oracle.step_s(
            times.of_group(0, size, tp).both_s.tolist(),
            sent,
            [4 * layer.parameters(Shape(1, job.sequence)) / tp for layer in job.graph.layers],
            counts,
            tp=tp,
            dp=layout.dp,
            micro_batches=micro_batches,
            devices=group.devices,
            inside=LINK.bytes_per_s,
            between=LINK.bytes_per_s,
        )
        compute = problem.cost_model.compute
        update_s = compute.stage_times(
            job.graph, range(layers), Shape(1, job.sequence), job.precision, group.device
        ).update_s
        # Beside the form: twice the update, by layers, and a microsecond per micro-batch.
        form_s += 2 * update_s / tp * max(counts) / layers + 1e-6 * micro_batches
        assert estimate_s == pytest.approx(form_s, rel=0.01), str(layout)
