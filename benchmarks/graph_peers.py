"""PipeDream's optimizer and Piper's program on inputs that they ship, beside weft's ports of them.

    python benchmarks/graph_peers.py

Clone https://github.com/msr-fiddle/pipedream and https://github.com/msr-fiddle/piper, and name the clones in
WEFT_PIPEDREAM and WEFT_PIPER. WEFT_PEER_PYTHON is a Python with numpy and graphviz, if this one lacks them;
Piper is compiled by g++. A program that is not named is left out. Ratios are those of the seconds of the
slowest stage.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from figures import Value
from harness import Report, parser
from peer_figures import program
from peer_programs.program import PeerProgram

from weft.describe.cluster import Link
from weft.planning.planners.downsets import Price, Question, RowSearch, downsets
from weft.planning.planners.graph_costs import Edge, GraphCosts, PassCosts
from weft.planning.planners.pipedream import PipeDreamPrice
from weft.planning.planners.piper import PiperPrice

BANDWIDTH = 1e9
PROFILES = Path("profiler/image_classification/profiles")
# (profile, devices)
PIPEDREAM = (("vgg16", 4), ("vgg16", 16), ("resnet50", 8), ("alexnet", 8), ("resnet18", 8))
# (input, devices, GiB of each)
PIPER = (
    ("resnet", 8, 64.0),
    ("resnet", 8, 16.0),
    ("resnet", 8, 8.0),
    ("resnet", 16, 6.0),
    ("resnet", 16, 8.0),
)
_NODE = re.compile(
    r"(\S+) -- (.*) -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
    r"activation_size=(\S.*?), parameter_size=([\d.]+)"
)
_RUN = (
    "import runpy, sys; sys.path[:0] = sys.argv[1:3]; sys.argv = sys.argv[3:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
_DRIVER = """
#define main experiments
#include "algo.cpp"
#undef main
int main(int count, char **words) {
    json j; ifstream file(words[1]); file >> j;
    Instance ins = j.get<Instance>();
    ins.maxDevices = stoi(words[2]);
    ins.maxMemoryPerDevice = stod(words[3]) * (1 << 30);
    TENSOR_PARALLELISM_ALLOWED = false;
    ACTIVATION_RECOMPUTATION_ALLOWED = false;
    Graph g(ins);
    Result found = g.runDP();
    cout << setprecision(17) << g.getTPSForResult(found) << " " << found.stages.size() << endl;
}
"""


def costs_of(
    edges: list[Edge],
    columns: list[list[float]],
    *,
    devices: int,
    batch: int,
    bytes_per_s: float,
    memory: float,
) -> GraphCosts:
    """Layers with these seconds, kept, sent, held and reduced bytes of one micro-batch of one sample."""
    seconds, kept, sent, held, reduced = (np.array(column) for column in columns)
    none = np.zeros(len(seconds))
    return GraphCosts(
        edges=tuple(edges),
        passes={(1, "none"): PassCosts(seconds, none, kept, none, sent)},
        state_bytes=held,
        buffer_bytes=none,
        reduced_bytes=reduced,
        memory_bytes=memory,
        devices=devices,
        global_batch=batch,
        link=Link(bytes_per_s, 0.0),
    )


def ordered(names: list[str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """The place of each name in a topological order."""
    waiting = {name: sum(end == name for _, end in edges) for name in names}
    places: dict[str, int] = {}
    while ready := [name for name in waiting if not waiting[name]]:
        for name in ready:
            places[name] = len(places)
            del waiting[name]
            for begin, end in edges:
                if begin == name:
                    waiting[end] -= 1
    return places


def profile(path: Path, devices: int) -> GraphCosts:
    """A profile of PipeDream without its inputs, which its optimizer leaves out, too."""
    text = path.read_text()
    rows = {found[1]: found for found in map(_NODE.match, text.splitlines()) if found}
    kept = {name: row for name, row in rows.items() if not row[2].startswith("Input")}
    pairs = [(one, other) for one, other in re.findall(r"\t(\S+) -- (\S+)", text) if one in kept]
    places = ordered(list(kept), pairs)
    lines = [kept[name] for name in places]
    sent = [sum(map(float, re.findall(r"[\d.]+", row[5]))) for row in lines]
    weights = [float(row[6]) for row in lines]
    seconds = [(float(row[3]) + float(row[4])) / 1000.0 for row in lines]
    edges = sorted((places[one], places[other]) for one, other in pairs)
    return costs_of(
        edges,
        [seconds, sent, sent, weights, weights],
        devices=devices,
        batch=devices,
        bytes_per_s=BANDWIDTH,
        memory=float("inf"),
    )


def instance(path: Path, devices: int, memory: float) -> GraphCosts:
    """An input of Piper, with the first choice of each layer on one device."""
    said = json.loads(path.read_text())
    pairs = [(str(edge["sourceId"]), str(edge["destId"])) for edge in said["edges"]]
    nodes = {str(node["id"]): node["TMPCs"]["1"][0] for node in said["nodes"]}
    places = ordered(list(nodes), pairs)
    outputs = {str(edge["sourceId"]): edge["communicationCost"] for edge in said["edges"]}
    lines = [nodes[name] for name in places]
    return costs_of(
        sorted((places[one], places[other]) for one, other in pairs),
        [
            [one["timePerSample"] for one in lines],
            [one["memoryUsageA"] for one in lines],
            [outputs.get(name, 0.0) for name in places],
            [one["memoryUsageB"] for one in lines],
            [one["parameterSize"] for one in lines],
        ],
        devices=devices,
        batch=said["mbsInBatch"],
        bytes_per_s=said["bandwidth"],
        memory=memory,
    )


def port_s(costs: GraphCosts, price: Price) -> tuple[float, int, float]:
    """The port's seconds of the slowest stage, its stages and the seconds of the search."""
    began = time.process_time()
    sets = downsets(costs.layers, costs.edges, 40_000)
    assert sets is not None, "shipped inputs have few downsets"
    degrees = tuple(one for one in range(1, costs.devices + 1) if costs.global_batch % one == 0)
    if isinstance(price, PipeDreamPrice):
        degrees = tuple(range(1, costs.devices + 1))
    search = RowSearch(costs=costs, sets=sets, price=price)
    counts = range(1, costs.devices + 1) if isinstance(price, PiperPrice) else [costs.devices]
    rows = search.rows(
        Question(1, ("none",), tuple(one for one in degrees if one <= count), count) for count in counts
    )
    best = min(rows, key=lambda row: row.sample_s)
    return best.sample_s, len(best.graph.stages), time.process_time() - began


def pipedream(report: Report, peer: PeerProgram) -> None:
    root = peer.root.absolute()
    for name, devices in PIPEDREAM:
        path = root / PROFILES / name / "graph.txt"
        cell = f"PipeDream, {name} on {devices}"
        if not report.missing(cell):
            continue
        script = str(root / "optimizer" / "optimizer_graph_hierarchical.py")
        words = ["-n", str(devices), "-f", str(path), "-b", str(BANDWIDTH)]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            said = peer.run(
                ["-c", _RUN, str(root), str(root / "optimizer"), script, *words], Path(folder)
            ).read_text()
        theirs_s = time.perf_counter() - began
        theirs = float(re.findall(r"Time per stage in pipeline: ([\d.e-]+)", said)[0])
        price = PipeDreamPrice(bytes_per_s=BANDWIDTH, variant="code", every_micro_batch=True)
        ours, stages, ours_s = port_s(profile(path, devices), price)
        found = compared(ours, theirs, ours_s, theirs_s)
        report.add_cell(cell, {**found, "stages": Value(stages, "count")})


def piper(report: Report, peer: PeerProgram) -> None:
    root = peer.root.absolute()
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "driver.cpp", Path(folder) / "driver"
        source.write_text(_DRIVER)
        options = ["-O2", "-std=c++17", "-w", f"-I{root}", "-include", "numeric", "-include", "cassert"]
        options += ["-include", "cmath", "-include", "algorithm", "-include", "unordered_map"]
        subprocess.run(["g++", *options, str(source), "-o", str(binary)], check=True)
        for name, devices, gib in PIPER:
            cell = f"Piper, {name} on {devices} of {gib:g} GiB"
            if not report.missing(cell):
                continue
            path = root / "inputs" / f"{name}.json"
            began = time.perf_counter()
            said = subprocess.run(
                [str(binary), str(path), str(devices), str(gib)],
                check=True,
                capture_output=True,
                text=True,
                timeout=300.0,
            ).stdout
            theirs_s = time.perf_counter() - began
            theirs = float(said.split()[0])
            costs = instance(path, devices, gib * 2**30)
            ours, stages, ours_s = port_s(costs, PiperPrice(bytes_per_s=costs.link.bytes_per_s))
            found = compared(ours, theirs, ours_s, theirs_s)
            report.add_cell(cell, {**found, "stages": Value(stages, "count")})


def compared(ours: float, theirs: float, ours_s: float, theirs_s: float) -> dict[str, Value]:
    """Both answers, how far they are apart, and both searches."""
    return {
        "slowest stage": Value(ours, "s"),
        "over the original": Value(ours / theirs, "ratio", 1.0, met=abs(ours / theirs - 1.0) < 1e-6),
        "search": Value(ours_s, "s"),
        "search of the original": Value(theirs_s, "s"),
    }


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("graph_peers", options().parse_args())
    report.print_machine()
    for name, run in (("pipedream", pipedream), ("piper", piper)):
        if peer := program(report, name, f"https://github.com/msr-fiddle/{name}"):
            run(report, peer)


if __name__ == "__main__":
    main()
