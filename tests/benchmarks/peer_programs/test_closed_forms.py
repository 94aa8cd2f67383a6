"""Other people's closed forms come out of weft where weft is told what they assume."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import calculon, metis
from predict.cost.steps import machine

from weft.describe.amount import Shape
from weft.describe.cluster import Link
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph, chain_edges
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.moves.layout import build_plan
from weft.planning.compile import compile_plan
from weft.planning.planners.metis_form import metis_form_s
from weft.planning.problem import problem_of
from weft.predict.abstract import PassTimes, simulate_schedule
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.measurements import Measurements
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming, MachineMeasurement

FREE = Link(1e30, 0.0)
A100 = Device(
    name="a100",
    memory_bytes=80 * 10**9,
    memory_bytes_per_s=calculon.MEMORY,
    flops_per_s={"bf16": calculon.PEAK},
    launch_s=0.0,
)


def speeds(steps: tuple[tuple[float, float], ...], peak: float) -> tuple[tuple[float, float], ...]:
    """A table that is a step function: two points at each step."""
    points = []
    for place, (least, share) in enumerate(steps):
        last = steps[place + 1][0] if place + 1 < len(steps) else 1e18
        points += [(least + 1.0, share * peak), (last, share * peak)]
    return tuple(points)


# Calculon's tables as if somebody had measured them, and nothing else.
TABLES = MachineMeasurement(
    device=A100.name,
    matmul={"bf16": speeds(calculon.MATRIX_STEPS, calculon.PEAK)},
    memory=speeds(calculon.MEMORY_STEPS, calculon.MEMORY),
    launch_s=0.0,
    instruction_s=0.0,
    compute_slowdown=1.0,
    communication_slowdown=1.0,
    message=(),
    collectives={},
    spread=0.0,
)


@st.composite
def calculon_cases(draw: st.DrawFn) -> calculon.Case:
    pp, loops = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    heads, tp = draw(st.sampled_from([8, 16])), draw(st.sampled_from([1, 2, 4, 8]))
    h = heads * draw(st.sampled_from([64, 128]))
    return calculon.Case(
        blocks=pp * loops * draw(st.integers(1, 3)),
        h=h,
        heads=heads,
        f=4 * h,
        s=draw(st.sampled_from([512, 2048])),
        b=draw(st.sampled_from([1, 2, 4])),
        tp=tp,
        pp=pp,
        # Stages of one device are reduced one after the other, beside the steps of those before.
        dp=1 if loops > 1 else draw(st.sampled_from([1, 2, 3])),
        loops=loops if pp > 1 else 1,
        micro_batches=pp * draw(st.integers(1, 4)),
        recompute=draw(st.booleans()),
        link=draw(st.sampled_from([25e9, 300e9])),
    )


def blocks_only(case: calculon.Case) -> LayerGraph:
    config = ModelConfig(
        name="blocks",
        family="gpt",
        layers=case.blocks,
        hidden=case.h,
        heads=case.heads,
        key_value_heads=case.heads,
        feed_forward=case.f,
        vocabulary=128,
        sequence=case.s,
    )
    graph = layer_graph(config)
    layers = graph.layers[1:-1]
    return replace(graph, layers=layers, edges=chain_edges(len(layers)))


@settings(max_examples=20)
@given(calculon_cases())
def test_calculons_tables_and_no_overlap_give_calculons_step(case: calculon.Case) -> None:
    graph = blocks_only(case)
    # Tensor ranks and replicas share a node, stages are on different ones.
    where = machine(
        device=A100, inside=Link(case.link, 0.0), between=FREE, nodes=case.pp, devices=case.tp * case.dp
    )
    layout = Layout(
        pp=case.pp,
        dp=case.dp,
        tp=case.tp,
        loops=case.loops,
        micro_batch_size=case.b,
        schedule="depth-first" if case.loops > 1 else "1f1b",
        recompute="full" if case.recompute else "none",
        blocking=("reductions",),
        layers_per_stage=(case.blocks // (case.pp * case.loops),) * (case.pp * case.loops),
    )
    batch = case.dp * case.micro_batches * case.b
    job = Job(graph=graph, cluster=where, global_batch=batch, sequence=case.s, precision="bf16")
    plan = build_plan(job, layout, ())
    program = compile_plan(plan, graph)
    # Its collectives are rings at the speed of the links.
    with mock.patch.object(Network, "_by_library", False):
        model = CostModel(graph=graph, cluster=where, machine=TABLES)
        step_s = predict(model, plan, program).prediction.first_step_s
    assert step_s == pytest.approx(calculon.step_s(case), rel=0.01)


PROBLEM = problem_of(model="gpt-1m", on="16xt4", global_batch=48, precision="fp16")
KINDS = ("embedding", "block", "head")
ms = st.floats(0.1, 20.0)


@settings(max_examples=20)
@given(
    st.dictionaries(st.sampled_from(KINDS), st.tuples(ms, ms), min_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_metis_form_is_metis_closed_form_on_equal_devices(
    times: dict[str, tuple[float, float]], pp: int, dp: int, tp: int, size: int, data: st.DataObject
) -> None:
    """On the same profile, whose times contain what tensor ranks exchange."""
    job = PROBLEM.job
    (group,), graph = job.cluster.groups, job.graph
    layers = len(graph.layers)
    ends = sorted(data.draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1)))
    counts = tuple(end - start for start, end in zip([0, *ends], [*ends, layers], strict=True))
    timings = tuple(
        LayerTiming(
            device=group.device.name,
            layer=kind,
            tp=tp,
            micro_batch_size=size,
            forward_s=1e-3 * forward,
            backward_s=1e-3 * backward,
            update_s=0.0,
            activation_bytes=0,
        )
        for kind, (forward, backward) in times.items()
    )
    profile = LayerProfile(model_fingerprint="", sequence=0, precision="", timings=timings, spread=0.0)
    layout = Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        loops=1,
        micro_batch_size=size,
        schedule="1f1b",
        layers_per_stage=counts,
    )
    found = metis_form_s(replace(PROBLEM, measurements=Measurements(profile=profile)), layout)
    h, tokens = PROBLEM.model.hidden, job.sequence * size
    held = [layer.parameters(Shape(1, job.sequence, tp)) for layer in graph.layers]
    expected = metis.step_s(
        [1e-3 * sum(times[layer.kind]) for layer in graph.layers],
        [2 * tokens * h / tp] * layers,
        [4 * one for one in held],
        counts,
        tp=tp,
        dp=dp,
        micro_batches=job.global_batch // (dp * size),
        devices=group.devices,
        inside=group.link.bytes_per_s,
        between=job.cluster.links[group.name, group.name].bytes_per_s,
    )
    assert found == pytest.approx(expected, rel=0.01)


def fractions(draws: np.ndarray) -> list[Fraction]:
    return [Fraction(int(one)) for one in draws]


def test_the_common_closed_form_over_charges_unequal_stages_and_its_bounds_hold() -> None:
    """AMP's, Metis's and others', without communication: up to a fifth too much where backwards take twice
    their forwards; where they take different multiples it is no bound either way."""
    random = np.random.Generator(np.random.Philox(key=1))
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for alike in (True, False):
        for _ in range(60):
            stages, micro_batches = int(random.integers(2, 7)), int(random.integers(2, 13))
            forward = fractions(random.integers(1, 21, stages))
            multiples = [Fraction(2)] * stages if alike else fractions(random.integers(1, 4, stages))
            times = [PassTimes(one, one * more) for one, more in zip(forward, multiples, strict=True)]
            both = [one.forward + one.backward for one in times]
            simulated = simulate_schedule(
                "1f1b", devices=stages, micro_batches=micro_batches, stage_times=times
            ).makespan
            estimate = sum(both) + (micro_batches - 1) * max(both)
            assert simulated >= max(micro_batches * max(both), sum(both))
            ratios[alike].append(float(simulated / estimate))
    assert max(ratios[True]) <= 1.0
    assert 0.75 < min(ratios[True]) < 0.9
    assert 1.0 < max(ratios[False]) < 1.1
