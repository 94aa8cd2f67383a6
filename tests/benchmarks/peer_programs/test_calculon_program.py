"""Calculon's own program against what is written out of it, and weft with its times against its steps."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
from benchmarks.peer_programs.blocks import A100, case_of, drawn
from benchmarks.peer_programs.clones import program
from oracles import calculon_program as oracle
from predict.cost.steps import machine

from benchmarks.peer_programs.calculon import Calculon
from benchmarks.peer_programs.calculon_files import system
from weft.describe.cluster import Link
from weft.describe.job import Job
from weft.moves.layout import build_plan
from weft.planning.compile import compile_plan
from weft.planning.problem import problem_of
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming


def test_the_program_says_what_is_written_out_of_it() -> None:
    plans = drawn(20, key=1)
    answers = Calculon(program=program("calculon")).say([asked for asked, _ in plans])
    for (asked, layout), said in zip(plans, answers, strict=True):
        assert said.step_s == pytest.approx(oracle.step_s(case_of(asked, layout)), rel=1e-6), str(layout)


def test_weft_with_its_times_of_blocks_gives_its_step() -> None:
    """Pipeline, gradients and optimizer, where messages are free and rings have no latency."""
    free, ring = oracle.Network(1e30, 0.0, oracle.INSIDE), {**oracle.INSIDE, "all": (2.0, -1)}
    for asked, layout in drawn(20, key=2):
        model, layout = asked.model, replace(layout, recompute="none")
        # Weft reduces gradients in 32 bits, the program in 16.
        case = case_of(asked, layout)._replace(pipeline=free, data=oracle.Network(12.5e9, 0.0, ring))
        timing = LayerTiming(
            device=A100.name,
            layer="block",
            tp=layout.tp,
            micro_batch_size=layout.micro_batch_size,
            forward_s=oracle.block(case).forward_s,
            backward_s=oracle.block(case).backward_s,
            update_s=oracle.block(case).update_s,
            activation_bytes=0,
        )
        profile = LayerProfile(model_fingerprint="", sequence=0, precision="", timings=(timing,), spread=0.0)
        devices = layout.tp * layout.dp
        cluster = machine(
            device=A100,
            inside=Link(25e9, 0.0),
            between=Link(1e30, 0.0),
            nodes=layout.pp,
            devices=devices,
        )
        job = Job(
            graph=asked.graph,
            cluster=cluster,
            global_batch=asked.plan.global_batch,
            sequence=asked.plan.sequence,
            precision="bf16",
        )
        cut = replace(layout, layers_per_stage=(model.layers // layout.stages,) * layout.stages)
        plan = build_plan(job, cut, ())
        program = compile_plan(plan, asked.graph)
        # Its collectives are rings at the speed of the links.
        with mock.patch.object(Network, "_by_library", False):
            model_of_costs = CostModel(graph=asked.graph, cluster=cluster, profile=profile)
            step = predict(model_of_costs, plan, program).prediction
        assert step.first_step_s == pytest.approx(oracle.step_s(case), rel=0.01), str(layout)


def test_shares_are_those_that_it_publishes() -> None:
    text = (program("calculon").root / "systems" / "a100_80g.json").read_text(encoding="utf-8")
    theirs = json.loads(text)
    cluster = problem_of(model="gpt2", on="16xa100-80gb", precision="fp16").job.cluster
    ours = system(cluster, cluster.groups[0], "fp16")
    for key in ("matrix", "vector", "processing_mode"):
        assert ours[key] == theirs[key]
    assert ours["mem1"]["MB_efficiency"] == theirs["mem1"]["MB_efficiency"]
    for mine, other in zip(ours["networks"], theirs["networks"], strict=True):
        for key in ("bandwidth", "efficiency", "ops", "processor_usage"):
            assert mine[key] == other[key]
