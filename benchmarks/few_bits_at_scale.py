"""What SDP4Bit gains on 128 GPUs, predicted from data sheets alone, beside the 4.08 times of its paper.

GPT of 125M to 6.7B parameters, 2048 tokens, bf16, zero-1, on 32 nodes of four A100 with 100 Gbit/s each. The
paper's scripts run one micro-batch in each replica and overlap nothing. Other baselines overlap reductions,
accumulate eight micro-batches, or reduce gradients in bf16: the gain shrinks with each.

    python benchmarks/few_bits_at_scale.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from figures import Value
from harness import Report, parser

from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.moves.layout import build_plan, flops_per_layer
from weft.planning.compile import compile_folded
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict

# Layers, hidden size, heads, tensor ranks.
MODELS = {
    "125m": (12, 768, 12, 1),
    "350m": (24, 1024, 16, 1),
    "1.3b": (24, 2048, 32, 1),
    "6.7b": (32, 4096, 32, 4),
}
GPUS, PER_NODE, LINK = 128, 4, Link(12.5e9, 5e-6)
PAPER_GAIN = 4.08
# Of both sides: micro-batches of a replica, and whether reductions wait for the step's end.
REGIMES = {
    "no overlap, 1 micro-batch": (1, True),
    "overlap, 1 micro-batch": (1, False),
    "overlap, 8 micro-batches": (8, False),
}


def gpt(name: str) -> ModelConfig:
    layers, hidden, heads, _ = MODELS[name]
    return ModelConfig(
        name=f"gpt-{name}",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        feed_forward=4 * hidden,
        vocabulary=51200,
        sequence=2048,
    )


def cluster() -> Cluster:
    group = replace(parse_cluster("4xa100-40gb").groups[0], count=GPUS // PER_NODE, devices=PER_NODE)
    return Cluster(name="slingshot", groups=(group,), links={(group.name, group.name): LINK})


def step_s(
    model: CostModel, name: str, micro_batches: int, blocking: bool, sync: str, reduced: str | None
) -> float:
    """Predicted seconds of a step."""
    tensor_parallel = MODELS[name][3]
    layout = Layout(
        pp=1,
        dp=GPUS // tensor_parallel,
        tp=tensor_parallel,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        sharding="zero-1",
        blocking=("reductions",) if blocking else (),
        sync=sync,
        recompute="full",
    )
    job = Job(
        graph=model.graph,
        cluster=model.cluster,
        global_batch=micro_batches * layout.dp,
        sequence=2048,
        precision="bf16",
        reduce_precision=reduced,
    )
    plan = build_plan(job, layout, flops_per_layer(job))
    return predict(model, plan, compile_folded(plan, job.graph, job.cluster)).prediction.step_s


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("few_bits_at_scale", options().parse_args())
    report.print_machine()
    gains = []
    for name in MODELS:
        model = CostModel(graph=layer_graph(gpt(name)), cluster=cluster())
        for regime, (micro_batches, blocking) in REGIMES.items():
            cell = f"gpt-{name}, {regime}"
            if report.missing(cell):
                dense, bf16, few = (
                    step_s(model, name, micro_batches, blocking, sync, reduced)
                    for sync, reduced in (("dense", None), ("dense", "bf16"), ("sdp4bit", None))
                )
                report.add_cell(
                    cell,
                    {
                        "dense step": Value(dense, "s"),
                        "gain": Value(dense / few, "ratio"),
                        "gain over bf16 gradients": Value(bf16 / few, "ratio"),
                    },
                )
            gains.append(report.values(cell)["gain"])
    report.add("largest gain / the paper's", Value(max(gains) / PAPER_GAIN, "ratio"))


if __name__ == "__main__":
    main()
