"""Make the tables of docs/benchmarks.md from the record of figures.

    python benchmarks/tables.py                  # from benchmarks/figures.jsonl, which `make bench` fills
    python benchmarks/tables.py --record FILE

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`. One whose benchmark has no figures in the
record stays as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Record, Row, current

HERE = Path(__file__).resolve().parent
RECORD = HERE / "figures.jsonl"
PAGE = HERE.parent / "docs" / "benchmarks.md"
_MARKED = re.compile(r"(<!-- figures: (?P<name>.+?) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Listed:
    """One row for each figure whose name matches."""

    benchmark: str
    names: str = ".*"

    def lines(self, rows: Sequence[Row]) -> list[str]:
        found = ["| what | figure | target |", "|---|---|---|"]
        for row in rows:
            target = row.figure.verdict().replace("MISSED", "missed") or "-"
            found.append(_line([row.figure.name, _shown(row), target]))
        return found


@dataclass(frozen=True, slots=True)
class Crossed:
    """One row for each cell whose figures' names match, one column for each of its figures."""

    benchmark: str
    first: str
    columns: tuple[str, ...]
    names: str = ".*"

    def lines(self, rows: Sequence[Row]) -> list[str]:
        cells: dict[str, dict[str, Row]] = {}
        for row in rows:
            cell, _, what = row.figure.name.rpartition(": ")
            cells.setdefault(cell, {})[what] = row
        found = [_line([self.first, *self.columns]), "|" + "---|" * (1 + len(self.columns))]
        for cell, columns in cells.items():
            found.append(_line([cell, *(_judged(columns.get(what)) for what in self.columns)]))
        return found


_PLACERS = ("m-topo", "m-etf", "m-sct", "round-robin", "heft", "expert", "repair", "lower bound")

TABLES: Mapping[str, Listed | Crossed] = {
    "first_answer": Crossed(
        "first_answer", "job", ("imports", "first plan", "best plan", "first step over the best")
    ),
    "watching": Crossed(
        "watching",
        "a run of gpt-1m with",
        ("processor, of a core", "to each viewer per second", "step over a step without viewers"),
    ),
    "start_up": Listed("start_up", "import weft.*|weft .*"),
    "start_up, ranks": Crossed(
        "start_up",
        "the last of",
        (
            "reads the plan",
            "compiles its part",
            "once more",
            "peak",
            "compiles the whole",
            "verifies it",
            "peak of the whole",
        ),
        r"\d+ ranks, .*: .*",
    ),
    "start_up, growth": Listed("start_up", "from .*"),
    "first_step": Crossed("first_step", "what", ("weft", "torchrun with DDP", "ratio"), "first step, .*"),
    "first_step, groups": Crossed(
        "first_step", "what", ("a rank", "rank 0 with the store", "open files"), r"\d+ ranks.*"
    ),
    "programs": Listed("programs"),
    "simulator": Listed("simulator", "(?!one cycle of ).*"),
    "simulator, growth": Crossed("simulator", "what", ("one cycle", "each instruction"), "one cycle of .*"),
    "graph_runtime": Crossed(
        "graph_runtime",
        "stages",
        ("chain", "graph", "gain", "simulated", "error", "stages with others in flight"),
        "(?!.*, computing).*",
    ),
    "graph_runtime, computing": Crossed(
        "graph_runtime", "stages", ("chain", "graph", "gain", "simulated", "error"), ".*, computing: .*"
    ),
    "graph_planners": Crossed(
        "graph_planners",
        "job",
        ("graphpipe", "pipedream", "piper", "equal-split", "weft"),
        ".* v100-.*: (graphpipe|pipedream|piper|equal-split|weft)",
    ),
    "graph_planners, gains": Crossed(
        "graph_planners",
        "job",
        (
            "best published / graphpipe",
            "whole backwards",
            "and its micro-batch size",
            "flattened",
            "with replicas swept",
            "weft's chain / graphpipe",
        ),
        r".* v100-.*: (best published /|whole|and its|flattened|with replicas|weft's chain).*",
    ),
    "graph_planners, depths": Crossed(
        "graph_planners",
        "job",
        (
            "stages, graphpipe",
            "longest path, graphpipe",
            "stages, best published",
            "peak, graphpipe with its size",
            "peak, best published",
        ),
        ".* v100-.*: (stages, |longest path, graphpipe|peak, ).*",
    ),
    "graph_planners, case study": Listed("graph_planners", "case study.*"),
    "graph_planners, branches": Crossed(
        "graph_planners",
        "model",
        ("graphpipe, whole backwards", "gain", "gain over the flattened model"),
        ".* branches of .*",
    ),
    "graph_planners, searches": Crossed(
        "graph_planners",
        "job",
        tuple(f"{name}, search" for name in ("graphpipe", "pipedream", "piper", "equal-split", "weft")),
        ".*, search",
    ),
    "graph_peers": Crossed(
        "graph_peers",
        "program, input and devices",
        ("slowest stage", "stages", "over the original", "search", "search of the original"),
    ),
    "graph_planners, most": Listed("graph_planners", "(largest gain|jobs in which).*"),
    "placed_training": Crossed(
        "placed_training",
        "plan",
        ("micro-batches", "stages", "predicted step", "step"),
        "(placed alone|pipelined).*",
    ),
    "placed_training, memory": Crossed(
        "placed_training", "host", ("limit", "predicted", "counted", "error"), "memory of .*"
    ),
    "placed_training, ratios": Listed("placed_training", ".*(over pipelined|over the largest limit)"),
    "placement": Crossed(
        "placement",
        "graph",
        ("preparation", "prepared operators", "m-topo", "m-etf", "m-etf, unprepared"),
        r".*, [\d,]+ operators: .*",
    ),
    "placement, program": Crossed(
        "placement",
        "m-SCT's",
        (
            "by the program",
            "by the matching",
            "rounded / optimum",
            "matching / optimum",
            "m-sct",
            "m-sct by the matching",
            "m-etf",
        ),
        "program of .*",
    ),
    "placement, steps": Crossed("placement", "graph and devices", _PLACERS, ".* on [24] .*"),
    "placement, ratios": Crossed(
        "placement",
        "graph and devices",
        (
            "m-topo / expert",
            "m-etf / expert",
            "m-sct / expert",
            "c / p, 10 %",
            "c / p, median",
            "c / p, 90 %",
        ),
        ".* on [24] .*",
    ),
    "placement, exact": Crossed(
        "placement",
        "ratio",
        ("proved", "slowest proof", *_PLACERS[:-1], *(f"{one}, placed" for one in _PLACERS[:3])),
        "over proved optima.*",
    ),
    "placement, learned": Crossed(
        "placement",
        "learned placer",
        (
            "m-etf",
            "all evaluations",
            "step over m-etf's, 5% of evaluations",
            "step over m-etf's, 25% of evaluations",
            "step over m-etf's, 100% of evaluations",
            "time to m-etf's step over m-etf",
        ),
        "learned, .*",
    ),
    "placement, memory": Crossed(
        "placement", "graph", ("prepared operators", *_PLACERS[:-1]), ".* of the need: .*"
    ),
    "placement, profiles": Crossed(
        "placement",
        "graph",
        ("profiles", "refused", "too large in truth", "regret"),
        ".* profiles off .*",
    ),
    "placement_peer": Crossed(
        "placement_peer",
        "graph, links and placer",
        (
            "makespan",
            "over the original",
            "operators on the same device",
            "search",
            "search of the original",
        ),
    ),
    "bubbles": Crossed(
        "bubbles",
        "blocks; order",
        (
            "busy",
            "bound",
            "official",
            "official, busy",
            "official, added",
            "weft",
            "weft, busy",
            "weft, added",
            "exact",
            "cut in 4",
            "cut in 4, busy",
        ),
        "(base|large).*",
    ),
    "orders_with_curvature": Crossed(
        "orders_with_curvature",
        "model, device; order",
        (
            "step",
            "with K-FAC",
            "added by work",
            "fewest steps",
            "most steps",
            "busy",
            "busy with K-FAC",
            "pays below",
        ),
    ),
    "bubbles, time and idle shares": Listed("bubbles", "(weft|idle).*"),
    "recorder": Listed("recorder"),
    "codec_queues": Crossed("codec_queues", "codec; threads", ("measured", "simulated", "error")),
    "codec_queues, rates": Crossed(
        "codec_queues", "codec", ("compress", "aggregate", "decompress"), ".*; 1 thread: .*"
    ),
    "sync_codecs": Crossed("sync_codecs", "what", ("values a second", "of a copy")),
    "sync_links": Crossed(
        "sync_links",
        "method; link",
        ("step", "predicted", "error", "communication", "sent", "payload / formula"),
        "(?!.* over ).*; .*",
    ),
    "sync_links, gains": Crossed(
        "sync_links", "dense over", ("sent", "communication", "step"), ".* over .*; .*"
    ),
    "sync_links, weights": Listed("sync_links", "final weights.*|computation.*"),
    "node_losses": Listed("node_losses"),
    "server_sums": Crossed(
        "server_sums",
        "codec, owners",
        ("step", "predicted", "error", "replicas / servers", "memory of the fullest server"),
    ),
    "expert_links": Crossed(
        "expert_links",
        "mixture; link",
        ("step", "step, predicted", "step, error", "exchange", "exchange, predicted", "exchange, error"),
    ),
    "expert_links, parts": Crossed(
        "expert_links",
        "mixture; link",
        (
            "one all-to-all alone",
            "one all-to-all alone, predicted",
            "sum of gradients, error",
            "rest of the step, error",
            "bytes over those of even loads",
        ),
    ),
    "rates": Listed("rates"),
    "taps": Crossed("taps", "what trains", ("step", "added", "share")),
    "curvature": Crossed(
        "curvature",
        "factors",
        (
            "product",
            "over a plain product",
            "inverse",
            "over a plain Cholesky inverse",
            "over a product of its operations",
        ),
    ),
    "training_beside": Crossed(
        "training_beside", "program", ("tokens", "peak memory", "start-up"), "(?!.* over ).*"
    ),
    "training_beside, ratios": Crossed("training_beside", "ours over theirs", ("tokens/s",), ".* over .*"),
}


def table(name: str, rows: Iterable[Row]) -> list[str]:
    """The lines of a marked table, and one on where it was measured; none without figures."""
    asked = TABLES[name]
    found = [
        row
        for (benchmark, figure), row in current(rows).items()
        if benchmark == asked.benchmark and re.fullmatch(asked.names, figure)
    ]
    return [*asked.lines(found), "", measured_on(found)] if found else []


def measured_on(rows: Sequence[Row]) -> str:
    """Machine, versions and days of figures that one commit and machine gave."""
    machines = [row.machine for row in rows]
    first, last = machines[0], machines[-1]
    days = dict.fromkeys(machine.date[:10] for machine in (first, last))
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items() if name != "weft")
    said = (
        f"{first.cpu}, {first.cores} cores, {first.system}. {versions}. Commit {first.commit}, "
        f"{' to '.join(days)}. Load average {min(one.load for one in machines):.1f} to "
        f"{max(one.load for one in machines):.1f}, steal up to {max(one.steal for one in machines):.0%}."
    )
    if any(machine.busy for machine in machines):
        said += " *Busy*: others had the machine, too."
    return said


def with_tables(text: str, made: Callable[[str], list[str]]) -> str:
    """The page with its marked tables made anew; one for which nothing is made stays."""

    def replaced(match: re.Match[str]) -> str:
        lines = made(match["name"])
        return "\n".join([match[1], *lines, "", match[4]]) if lines else match[0]

    return _MARKED.sub(replaced, text)


def marked(text: str) -> dict[str, list[str]]:
    """The lines of each marked table of a page, by its name."""
    return {match["name"]: match["table"].strip("\n").splitlines() for match in _MARKED.finditer(text)}


def _shown(row: Row) -> str:
    return f"{row.figure.shown()}{' *busy*' if row.machine.busy else ''}"


def _judged(row: Row | None) -> str:
    if row is None:
        return "-"
    verdict = row.figure.verdict().replace("MISSED", "missed")
    return f"{_shown(row)}; target {verdict}" if verdict else _shown(row)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    rows, text = Record(asked.record).rows(), asked.page.read_text()
    asked.page.write_text(with_tables(text, lambda name: table(name, rows)))
    for name in marked(text):
        print(f"{name}: {'made' if table(name, rows) else 'stays, the record has no figures of it'}")


if __name__ == "__main__":
    main()
