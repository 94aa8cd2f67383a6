"""Blocks of GPT as plans on A100s, and the same case in the words of Calculon's program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from oracles import calculon_program as oracle
from predict.cost.steps import machine

from benchmarks.peer_programs.calculon import Question
from weft.describe.cluster import Link
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layer_graph import chain_edges
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.moves.layout import build_plan

DEVICES = 8
INSIDE, BETWEEN = Link(300e9, 3e-6), Link(200e9, 1e-5)
A100 = Device(
    name="a100",
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=2039e9,
    flops_per_s={"bf16": 312e12},
    launch_s=0.0,
)


def layout(**choices: object) -> Layout:
    given: dict[str, object] = {
        "pp": 1,
        "dp": 1,
        "loops": 1,
        "micro_batch_size": 1,
        "schedule": "1f1b",
        "blocking": ("reductions", "messages"),
    }
    return Layout(**{**given, **choices})  # type: ignore[arg-type]  # as the callers name them


def question(
    given: Layout, *, blocks: int = 4, h: int = 1024, heads: int = 16, s: int = 512, micro_batches: int = 4
) -> Question:
    """Blocks alone, dealt out equally, so many micro-batches to a replica."""
    config = ModelConfig(
        name="blocks",
        family="gpt",
        layers=blocks,
        hidden=h,
        heads=heads,
        key_value_heads=heads,
        feed_forward=4 * h,
        vocabulary=128,
        sequence=s,
    )
    graph = layer_graph(config)
    graph = replace(graph, layers=graph.layers[1:-1], edges=chain_edges(blocks))
    nodes = max(1, -(-given.ranks // DEVICES))
    cluster = machine(device=A100, inside=INSIDE, between=BETWEEN, nodes=nodes, devices=DEVICES)
    job = Job(
        graph=graph,
        cluster=cluster,
        global_batch=given.dp * micro_batches * given.micro_batch_size,
        sequence=s,
        precision="bf16",
    )
    given = replace(given, layers_per_stage=(blocks // given.stages,) * given.stages)
    return Question(model=config, graph=graph, cluster=cluster, plan=build_plan(job, given, ()))


def network(together: int) -> oracle.Network:
    """Where so many neighbouring ranks meet, and what is reached there."""
    if DEVICES % together == 0:
        return oracle.Network(0.65 * INSIDE.bytes_per_s, INSIDE.latency_s, oracle.INSIDE)
    return oracle.Network(0.9 * BETWEEN.bytes_per_s / DEVICES, BETWEEN.latency_s, oracle.BETWEEN)


def case_of(asked: Question, given: Layout) -> oracle.Case:
    model, replicas = asked.model, given.tp * given.dp
    plan = asked.plan
    return oracle.Case(
        blocks=model.layers,
        h=model.hidden,
        heads=model.heads,
        f=model.feed_forward,
        s=plan.sequence,
        b=plan.micro_batch_size,
        tp=given.tp,
        pp=given.pp,
        dp=given.dp,
        loops=given.loops,
        micro_batches=plan.micro_batches // given.dp,
        recompute=given.recompute == "full",
        peak=A100.flops_per_s["bf16"],
        memory=A100.memory_bytes_per_s,
        tensor=network(given.tp),
        data=network(replicas),
        pipeline=network(replicas * given.pp),
    )


def drawn(count: int, key: int) -> list[tuple[Question, Layout]]:
    """Plans that Calculon can say, of blocks in equal stages."""
    random = np.random.Generator(np.random.Philox(key=key))

    def one_of(*choices: int) -> int:
        return int(random.choice(choices))

    found = []
    for _ in range(count):
        pp, heads = one_of(1, 2, 4), one_of(8, 16)
        loops = one_of(1, 2) if pp > 1 else 1
        given = layout(
            pp=pp,
            dp=one_of(1, 2, 4),
            tp=one_of(1, 2, 4, 8),
            loops=loops,
            micro_batch_size=one_of(1, 2, 4),
            schedule="depth-first" if loops > 1 else "1f1b",
            recompute="full" if one_of(0, 1) else "none",
        )
        asked = question(
            given,
            blocks=pp * loops * one_of(1, 2, 3),
            h=heads * one_of(64, 128),
            heads=heads,
            s=one_of(512, 2048),
            micro_batches=pp * one_of(1, 2, 3, 4),
        )
        found.append((asked, given))
    return found
