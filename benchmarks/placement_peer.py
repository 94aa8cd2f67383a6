"""Baechi's own placers for PyTorch on the same graphs, beside weft's.

    python benchmarks/placement_peer.py

Clone https://github.com/chiragcshetty/BaechiPyTorch, and name the clone in WEFT_BAECHI; WEFT_PEER_PYTHON is a
Python with networkx, if this one lacks it. Without a clone, nothing is compared. Its m-SCT gets weft's
favourite children: its own program needs a solver with a licence. Temporary bytes are 0 and all permanent
bytes are parameters; both tests of its memory are weft's then. Seconds are of the processor for weft, and of
the clock inside its process for Baechi.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from figures import Value
from harness import Report, parser
from operator_graphs import A100, GRAPHS, devices_of
from peer_figures import program
from peer_programs.program import PeerProgram

from weft.planning.placement.board import Placement
from weft.planning.placement.favourites import favourites
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.list_scheduler import earliest_task_first, small_communication_times
from weft.planning.placement.topological import topological_fill

SOURCE = "https://github.com/chiragcshetty/BaechiPyTorch"
DEVICES, OPERATORS, SHARE = 4, 300, 0.5
# Fast links, so that favourites matter, and PCI Express.
LINKS = {"300 GB/s": 300e9, "25 GB/s": 25e9}
_DRIVER = """
import copy, json, logging, sys, time, types
import networkx
root, asked = sys.argv[1:]
sys.path[:0] = [root, root + "/baechi_core"]
sys.modules["cvxopt"] = types.ModuleType("cvxopt")
logging.disable(logging.CRITICAL)
from placer import m_etf, m_sct, m_topo
said = json.load(open(asked))
graph, devices = networkx.DiGraph(), networkx.Graph()
for number, (took, kept) in enumerate(said["operators"]):
    graph.add_node(number, id=number, name=str(number), weight=took, topo_order=number, temporary_mem=0,
                   permanent_mem=kept, peak_mem=kept, parameter_mem=kept)
for number, (made, reader, took, size) in enumerate(said["edges"]):
    tensor = {"name": str(made), "transfer_time": took, "bytes": size}
    graph.add_edge(made, reader, id=number, weight=took, tensor=tensor)
for number, memory in enumerate(said["memory"]):
    devices.add_node(number, id=number, name=str(number), used_mem=0, peak_mem=0, memory_limit=memory)
m_sct.FavoriteChildLPSolver.run = lambda self: said["paid"]
found = {}
for name, make in (("m-topo", m_topo.TopoUniform), ("m-etf", m_etf.ETF), ("m-sct", m_sct.SCT)):
    placer = make(copy.deepcopy(graph), copy.deepcopy(devices))
    began = time.perf_counter()
    placer.initialize()
    try:
        placer.run()
    except RuntimeError as error:
        found[name] = {"refused": str(error)}
        continue
    took = time.perf_counter() - began
    nodes = [placer.op_graph.nodes[number] for number in range(len(graph))]
    found[name] = {"seconds": took, "device": [node["p"] for node in nodes],
                   "end": [node.get("end_ts", 0) for node in nodes]}
print(json.dumps(found))
"""


def question(graph: OperatorGraph, devices: Devices, children: dict[int, int]) -> str:
    """The graph for the driver; each operator of it makes one tensor."""
    size = dict(zip(graph.producer.tolist(), graph.tensor_bytes.tolist(), strict=True))
    transfers = devices.least_transfer_ticks(graph.edge_bytes).tolist()
    edges = [
        (made, reader, took, size[made])
        for (made, reader), took in zip(graph.edges.tolist(), transfers, strict=True)
    ]
    operators = list(zip(graph.ticks[:, 0].tolist(), graph.permanent_bytes.tolist(), strict=True))
    paid = [int(children.get(made) != reader) for made, reader, *_ in edges]
    memory = devices.memory_bytes.tolist()
    return json.dumps({"operators": operators, "edges": edges, "memory": memory, "paid": paid})


def compare(report: Report, peer: PeerProgram, name: str, link: str) -> None:
    cell = f"{name}, {link}"
    if not report.missing(f"{cell}, m-etf"):
        return
    drawn = GRAPHS[name](OPERATORS, 0).graph([A100] * DEVICES)
    graph = replace(drawn, temporary_bytes=np.zeros_like(drawn.temporary_bytes))
    devices = devices_of(DEVICES, SHARE * float(graph.permanent_bytes.sum()), bytes_per_s=LINKS[link])
    children = dict(favourites(graph, devices).children)
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "question.json"
        asked.write_text(question(graph, devices, children))
        words = ["-c", _DRIVER, str(peer.root.absolute()), str(asked)]
        theirs = json.loads(peer.run(words, Path(folder)).read_text())
    ways: dict[str, Callable[[], Placement]] = {
        "m-etf": lambda: earliest_task_first(graph, devices),
        "m-sct": lambda: small_communication_times(graph, devices, children),
    }
    for way, call in ways.items():
        began = time.process_time()
        ours = call()
        ours_s = time.process_time() - began
        ratio = ours.makespan / max(theirs[way]["end"])
        alike = float((ours.device == np.array(theirs[way]["device"])).mean())
        found = {
            "makespan": Value(ours.makespan * 1e-9, "s"),
            "over the original": Value(ratio, "ratio", 1.0, met=ratio == 1.0),
            "operators on the same device": Value(alike, "share"),
            "search": Value(ours_s, "s"),
            "search of the original": Value(theirs[way]["seconds"], "s"),
        }
        report.add_cell(f"{cell}, {way}", found)
    if "refused" in theirs["m-topo"]:
        report.say(f"{cell}: the original's m-topo refuses: {theirs['m-topo']['refused']}")
        return
    began = time.process_time()
    filled = topological_fill(graph, devices)
    ours_s = time.process_time() - began
    alike = float((filled == np.array(theirs["m-topo"]["device"])).mean())
    found = {
        "operators on the same device": Value(alike, "share"),
        "search": Value(ours_s, "s"),
        "search of the original": Value(theirs["m-topo"]["seconds"], "s"),
    }
    report.add_cell(f"{cell}, m-topo", found)


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("placement_peer", options().parse_args())
    report.print_machine()
    if peer := program(report, "baechi", SOURCE):
        peer.require("baechi_core/placer/m_etf.py")
        for name in GRAPHS:
            for link in LINKS:
                compare(report, peer, name, link)


if __name__ == "__main__":
    main()
