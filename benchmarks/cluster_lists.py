"""Published lists of real clusters, read as `weft init --cluster` reads them, beside what a person reads.

    git clone https://github.com/OWNER/NAME FOLDER/OWNER/NAME      # each repository of the list below
    python benchmarks/cluster_lists.py FOLDER

A clone may be bare. Files are read at the listed commits; repositories that are absent are skipped.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import Report, file_at, parser

from weft.describe.inventory.nodes import read_nodes
from weft.describe.inventory.topology import read_topology


@dataclass(frozen=True, slots=True)
class Source:
    """A list in a file of a repository, from the first match of `begin` on, and what a person reads in it."""

    repository: str
    commit: str
    path: str
    begin: str
    words: Callable[[str], str]
    expected: str


def nodes_words(text: str) -> str:
    nodes = read_nodes(text, "list")
    kinds = sorted({f"{node.devices} {node.device}".strip() for node in nodes})
    return f"{len(nodes)} nodes of {', '.join(kinds)}; unusable {sum(bool(node.unusable) for node in nodes)}"


def topology_words(text: str) -> str:
    topology = read_topology(text, "matrix")
    return f"{topology.devices} devices: {' '.join(sorted(topology.kinds))}"


SYSTEMS = ("zhaochenyang20/Awesome-ML-SYS-Tutorial", "b5040f71e57dc63c850b0bca9ab14304612b4055")
EXPORTER = ("rivosinc/prometheus-slurm-exporter", "529aabaaf39fa7b70f5ba01644e2b2ca5b30574a")
SOURCES = [
    Source(*SYSTEMS, "torch/nccl/readme_en.md", r"\tGPU0\t", topology_words, "8 devices: SYS"),
    Source(*SYSTEMS, "torch/nccl/readme_en.md", r"        GPU0 ", topology_words, "8 devices: NV18"),
    Source(*EXPORTER, "exporter/fixtures/sinfo_out.json", "", nodes_words, "4 nodes of 0; unusable 1"),
]


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("clones", nargs="?", type=Path, help="a folder with OWNER/NAME of each repository")
    return made


def main() -> int:
    asked = options().parse_args()
    report, cases, failed = Report("cluster_lists", asked), 0, 0
    report.print_machine()
    for source in SOURCES:
        clone = None if asked.clones is None else asked.clones / source.repository
        if clone is None or not clone.exists():
            report.say(f"{source.repository}: skipped: no clone in {clone or 'a folder: give one'}")
            continue
        text = file_at(clone, source.commit, source.path).decode()
        found = re.search(source.begin, text)
        words = "no such list" if found is None else source.words(text[found.start() :])
        cases += 1
        failed += words != source.expected
        verdict = "as read by a person" if words == source.expected else f"a person read {source.expected}"
        report.say(f"{source.repository}:{source.path}: {words}; {verdict}")
    if cases:
        report.add_outcome("lists of clusters", cases, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
