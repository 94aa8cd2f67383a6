"""The constants of the data-sheet model against published runs they were fitted to.

`korthikanti.csv` and `korthikanti_memory.csv` hold tables 3 and 5 and figure 1 of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198: Megatron-LM on A100-80GB,
8 devices to a node. Recomputation, sequence parallelism and unfused attention, which these runs used, are
modelled here and nowhere else.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import pytest

from weft.describe.amount import ZERO, Amount, Shape
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import Layer, LayerGraph, Pass
from weft.describe.model import ModelConfig
from weft.predict.cost.compute import DATA_SHEET_HALF_WIDTH, ComputeModel
from weft.predict.cost.memory import stage_kept_bytes, state_bytes
from weft.predict.cost.network import Network

FOLDER = Path(__file__).parent
GIB = 2**30
MEAN_ERROR = 0.05
WORST_ERROR = 0.10


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


RUNS = rows("korthikanti.csv")


@dataclass(frozen=True)
class Run:
    row: dict[str, str]

    def count(self, key: str) -> int:
        return int(self.row[key])

    @property
    def shape(self) -> Shape:
        return Shape(self.count("micro_batch_size"), self.count("seq"), self.count("tp"))

    @property
    def sequence_parallel(self) -> bool:
        return self.row["sequence_parallel"] == "1"

    @property
    def graph(self) -> LayerGraph:
        return layer_graph(config_of(self.row))

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(f"{8 * self.count('nodes')}xa100-80gb")


def config_of(row: dict[str, str]) -> ModelConfig:
    return ModelConfig(
        name=row["name"],
        family="gpt",
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        key_value_heads=int(row["heads"]),
        feed_forward=int(row["ffn"]),
        vocabulary=int(row["vocab"]),
        sequence=int(row["seq"]),
        tied_embeddings=True,
    )


def as_run(layer: Layer, run: Run) -> tuple[Layer, Pass]:
    """The layer with unfused attention and sequence parallelism, and what its backward pass recomputes."""
    heads = run.count("heads")
    scores = Amount.of(heads, batch=1, sequence=2, tensor=1)
    products = tuple(m for m in layer.forward.matmuls if m.count != Amount.of(1))
    core = Pass(products, memory=scores * 6.0 if products else ZERO, kernels=len(products) + 3)

    def with_core(work: Pass, passes: float) -> Pass:
        memory = work.memory + core.memory * passes
        if run.sequence_parallel:
            memory = sharded(memory)
        return replace(work, memory=memory)

    forward = with_core(layer.forward, 1.0)
    # The fused kernel's backward pass computes nothing again that the unfused one has kept.
    layer = replace(layer, forward=forward, backward_input=with_core(layer.backward_input, 2.0))
    if layer.kind != "block":
        return layer, Pass()
    return layer, forward if run.row["recompute"] == "full" else core


def sharded(amount: Amount) -> Amount:
    """The same amount with what every tensor rank did in full shared among them."""
    terms = tuple(term if term.tensor else replace(term, tensor=1) for term in amount.terms)
    return Amount(()) if not terms else sum((Amount((term,)) for term in terms), Amount())


def predicted_step_s(run: Run) -> float:
    """Closed form of interleaved 1F1B (v = 1: 1F1B): M + (P - 1)/v micro-batches of the slowest device."""
    graph, shape, cluster = run.graph, run.shape, run.cluster
    devices, loops = run.count("pp"), run.count("loops")
    network = Network(cluster=cluster)
    device = cluster.groups[0].device
    layers, recomputed = zip(*(as_run(layer, run) for layer in graph.layers), strict=True)
    adjusted = replace(graph, layers=layers)
    again = replace(
        graph,
        layers=tuple(Layer(name=layer.name, kind=layer.kind, forward=work) for layer, work in zip(layers, recomputed, strict=True)),
    )

    def seconds(positions: range | tuple[int, ...]) -> tuple[float, float]:
        times = ComputeModel().stage_times(adjusted, positions, shape, "fp16", device)
        extra = ComputeModel().stage_times(again, positions, shape, "fp16", device).forward_s
        passes = 3 if run.row["recompute"] == "full" else 2
        reduced = [layers[index].tensor_reduced(shape) for index in positions]
        tensor_s = sum(network.all_reduce_s(range(8), round(2 * elements)) for elements in reduced if elements)
        return times.forward_s + times.backward_input_s + times.backward_weight_s + extra + passes * tensor_s, times.update_s

    last = len(layers) - 1
    blocks, update_s = seconds(range(1, 1 + run.count("layers") // devices))
    ends = max(seconds((0,))[0], seconds((last,))[0]) if devices > 1 else sum(seconds((0, last)))
    micro_batches = run.count("global_batch") // run.count("micro_batch_size")
    hop = 0.0
    if devices > 1:
        boundary = layers[1].sent(shape) * 2 / 8
        busy_s, latency_s = network.message_s(0, 8, round(boundary), sharing=8)
        hop = busy_s + latency_s
    return micro_batches * (blocks + ends) + (devices - 1) / loops * blocks + 2 * (devices - 1) * hop + update_s


def errors() -> dict[str, float]:
    return {
        row["name"]: predicted_step_s(Run(row)) / float(row["measured_step_s"]) - 1.0 for row in RUNS
    }
