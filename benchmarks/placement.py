"""Placements of operators: how fast they are made, how good they are, and how sure.

    python benchmarks/placement.py [--quick]

Graphs are those of `operator_graphs.py`: data sheets' A100 behind PCI Express, made by seeds. Seconds are of
the processor, once each, on one core. Steps are makespans of fused operators with parallel transfers. With
`--quick`, graphs have up to 10,000 operators and searches a tenth of their evaluations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from figures import Value
from harness import Report, quick_parser
from operator_graphs import A100, GRAPHS, V100, devices_of, layered, sparse

from weft.errors import InputError
from weft.planning.placement.board import Placement
from weft.planning.placement.bounds import communication_ratios, lower_bound_ticks
from weft.planning.placement.exact import exact
from weft.planning.placement.favourites import favourites
from weft.planning.placement.graph import Devices, OperatorGraph
from weft.planning.placement.learned import Improvement, improvements, lacking_bytes
from weft.planning.placement.list_scheduler import earliest_task_first, small_communication_times
from weft.planning.placement.placers import BAECHI, PLACERS
from weft.planning.placement.preparation import prepared
from weft.planning.placement.topological import depth_first_order, topological_fill
from weft.planning.placement.verification import check_placement, scheduled
from weft.randomness import counter_seed

TICK_S = 1e-9
MANY, FEW, DEVICES = 8, 200, 4
OVER_EXPERT = 1.062
COMPARED = (*BAECHI, "round-robin", "heft", "expert", "repair")
CAPS = (0.3, 0.35, 0.4, 0.5, 0.75, 1.0)
PROFILES, ERROR = 10, 0.2
SMALL_GRAPHS, SMALL = 30, 8
KINDS = {"4 A100": [A100] * DEVICES, "2 A100, 2 V100": [A100] * 2 + [V100] * 2}


@dataclass(frozen=True, slots=True)
class Asked:
    """A graph and devices with a share of the bytes that one device would need for all."""

    graph: OperatorGraph
    devices: Devices

    @classmethod
    def of(cls, name: str, operators: int, share: float = 1.0, kinds: str = "4 A100") -> Asked:
        graph = GRAPHS[name](operators, 0).graph(KINDS[kinds])
        need = int(graph.permanent_bytes.sum() + graph.temporary_bytes.max())
        return cls(graph, devices_of(DEVICES, share * need))

    def prepared(self) -> Asked:
        return Asked(prepared(self.graph, self.devices).fused, self.devices)

    def placed(self, name: str) -> Placement | None:
        """What a placer answers, checked; None if nothing fits."""
        try:
            placement = PLACERS[name](self.graph, self.devices)
        except InputError:
            return None
        wrong = check_placement(self.graph, self.devices, placement)
        assert not wrong, f"{name}: {wrong[0]}"
        return placement


def processor_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def walks(graph: OperatorGraph, devices: Devices) -> None:
    """Walk in both orders of m-topo."""
    topological_fill(graph, devices)
    topological_fill(graph, devices, depth_first_order(graph))


def speed(report: Report, name: str, operators: int) -> None:
    """Seconds of preparing and placing on many devices."""
    cell = f"{name}, {operators:,} operators"
    if not report.missing(cell):
        return
    graph = GRAPHS[name](operators, 0).graph([A100] * MANY)
    devices = devices_of(MANY, int(graph.permanent_bytes.sum()) / 3)
    prepare_s = processor_s(lambda: prepared(graph, devices))
    fused = prepared(graph, devices).fused
    found = {
        "preparation": Value(prepare_s, "s", 2.0),
        "prepared operators": Value(fused.operators, "count"),
        "m-topo": Value(processor_s(lambda: walks(graph, devices)), "s", 0.3),
        "m-etf": Value(processor_s(lambda: earliest_task_first(fused, devices)), "s", 2.0),
        "m-etf, unprepared": Value(processor_s(lambda: earliest_task_first(graph, devices)), "s"),
    }
    report.add_cell(cell, found)


def program(report: Report, operators: int) -> None:
    """Seconds of m-SCT's linear program, and how far favourites by it and by the matching are from it."""
    cell = f"program of {operators:,} operators"
    if not report.missing(cell):
        return
    graph = layered(operators).graph([A100] * MANY)
    # Links as fast as memory: otherwise each transfer takes longer than its operators.
    devices = devices_of(MANY, float(graph.permanent_bytes.sum()), bytes_per_s=900e9)
    began = time.process_time()
    solved = favourites(graph, devices, seconds=60.0)
    took = time.process_time() - began
    began = time.process_time()
    matched = favourites(graph, devices, most_operators=0)
    matched_s = time.process_time() - began
    found = {"by the matching": Value(matched_s, "s")}
    if solved.optimum_ticks is not None:
        found |= {
            "by the program": Value(took, "s", 30.0),
            "rounded / optimum": Value(solved.makespan_ticks / solved.optimum_ticks, "ratio"),
            "matching / optimum": Value(matched.makespan_ticks / solved.optimum_ticks, "ratio"),
        }
    for what, one in (("m-sct", solved), ("m-sct by the matching", matched)):
        placement = small_communication_times(graph, devices, one.children)
        found[what] = Value(placement.makespan * TICK_S, "s")
    found["m-etf"] = Value(earliest_task_first(graph, devices).makespan * TICK_S, "s")
    report.add_cell(cell, found)


def quality(report: Report, name: str, kinds: str) -> None:
    """Steps of all placers, and Baechi's best over the expert's."""
    cell = f"{name} on {kinds}"
    if not report.missing(cell):
        return
    asked = Asked.of(name, FEW, kinds=kinds).prepared()
    steps = {one: placement.makespan for one in COMPARED if (placement := asked.placed(one)) is not None}
    found = {one: Value(step * TICK_S, "s") for one, step in steps.items()}
    found["lower bound"] = Value(lower_bound_ticks(asked.graph) * TICK_S, "s")
    for one in BAECHI:
        if one in steps and "expert" in steps:
            found[f"{one} / expert"] = Value(steps[one] / steps["expert"], "ratio", OVER_EXPERT)
    ratios = communication_ratios(asked.graph, asked.devices)
    if len(ratios):
        tenth, half, most = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist()
        found |= {f"c / p, {what}": Value(one, "ratio") for what, one in (("10 %", tenth), ("90 %", most))}
        found["c / p, median"] = Value(half, "ratio")
        if half > 1.0:
            share = float((ratios > 1.0).mean())
            report.say(f"{cell}: warning: {share:.0%} of transfers take longer than one of their operators")
    report.add_cell(cell, found)


def against_exact(report: Report, share: float) -> None:
    """All placers over proved optima of random graphs of eight operators on two devices."""
    cell = f"over proved optima, memory {share:.0%} of all bytes"
    if not report.missing(cell):
        return
    ratios: dict[str, list[float]] = {one: [] for one in COMPARED}
    proved, worst_s = 0, 0.0
    for seed in range(SMALL_GRAPHS):
        graph = sparse(SMALL, seed).graph([A100] * 2)
        devices = devices_of(2, share * float(graph.permanent_bytes.sum()), bytes_per_s=300e9)
        began = time.process_time()
        try:
            best = exact(graph, devices)
        except InputError:
            continue
        finally:
            worst_s = max(worst_s, time.process_time() - began)
        proved += best.proved
        for one in COMPARED if best.proved else ():
            if (placement := Asked(graph, devices).placed(one)) is not None:
                ratios[one].append(placement.makespan / best.placement.makespan)
    found = {one: Value.of_repeats(values, "ratio") for one, values in ratios.items() if values}
    counted = {f"{one}, placed": Value(len(values), "count") for one, values in ratios.items()}
    slowest = {"slowest proof": Value(worst_s, "s")}
    report.add_cell(cell, {"proved": Value(proved, "count"), **slowest, **found, **counted})


def curve(report: Report, name: str, evaluations: int) -> None:
    """The learned placer's steps over m-ETF's after some evaluations, and its time to the same step."""
    cell = f"learned, {name}"
    if not report.missing(cell):
        return
    asked = Asked.of(name, FEW).prepared()
    greedy_s = processor_s(lambda: earliest_task_first(asked.graph, asked.devices))
    greedy = earliest_task_first(asked.graph, asked.devices).makespan
    began, seen = time.process_time(), list[tuple[float, Improvement]]()
    for one in improvements(asked.graph, asked.devices, evaluations=evaluations):
        seen.append((time.process_time() - began, one))
    total_s = time.process_time() - began
    found = {"m-etf": Value(greedy_s, "s"), "all evaluations": Value(total_s, "s")}
    for part in (0.05, 0.25, 1.0):
        known = [one for _, one in seen if one.evaluations <= part * evaluations]
        if known:
            ratio = known[-1].placement.makespan / greedy
            found[f"step over m-etf's, {part:.0%} of evaluations"] = Value(ratio, "ratio")
    reached = [second for second, one in seen if one.placement.makespan <= greedy]
    if reached:
        found["time to m-etf's step over m-etf"] = Value(reached[0] / greedy_s, "ratio")
    else:
        report.say(f"{cell}: m-etf's step is not reached in {evaluations} evaluations, {total_s:.1f} s")
    report.add_cell(cell, found)


def memory(report: Report, name: str, share: float) -> None:
    """Steps over the work of one device with less memory; a dash: refused."""
    cell = f"{name}, memory {share:.0%} of the need"
    if not report.missing(cell):
        return
    asked = Asked.of(name, FEW, share).prepared()
    alone = float(asked.graph.ticks[:, 0].sum())
    found = {
        one: Value(placement.makespan / alone, "ratio")
        for one in COMPARED
        if (placement := asked.placed(one)) is not None
    }
    report.add_cell(cell, {"prepared operators": Value(asked.graph.operators, "count"), **found})


def perturbed(graph: OperatorGraph, seed: int) -> OperatorGraph:
    """The same graph with times and bytes of operators off by up to a fifth, each by itself."""
    generator = np.random.default_rng(counter_seed(seed, "profile"))
    factors = generator.uniform(1 - ERROR, 1 + ERROR, (3, graph.operators))
    return replace(
        graph,
        ticks=np.maximum(np.rint(graph.ticks * factors[0][:, None]), 1).astype(np.int64),
        permanent_bytes=np.rint(graph.permanent_bytes * factors[1]).astype(np.int64),
        temporary_bytes=np.rint(graph.temporary_bytes * factors[2]).astype(np.int64),
    )


def profiles(report: Report, name: str, placer: str) -> None:
    """Placements by wrong profiles, timed by the right one, over the placement by the right one."""
    cell = f"{name} by {placer}, profiles off by {ERROR:.0%}"
    if not report.missing(cell):
        return
    asked = Asked.of(name, FEW, 0.4).prepared()
    right = asked.placed(placer)
    if right is None:
        report.say(f"{cell}: refused with the right profile")
        return
    regrets, fits, refused = list[float](), 0, 0
    for seed in range(PROFILES):
        guess = Asked(perturbed(asked.graph, seed), asked.devices).placed(placer)
        if guess is None:
            refused += 1
            continue
        real = scheduled(asked.graph, asked.devices, guess.device, guess.sequence)
        regrets.append(real.makespan / right.makespan - 1.0)
        fits += lacking_bytes(asked.graph, asked.devices, guess.device) == 0
    found: Mapping[str, Value] = {
        "profiles": Value(PROFILES, "count"),
        "refused": Value(refused, "count"),
        "too large in truth": Value(len(regrets) - fits, "count"),
    }
    if regrets:
        found = {**found, "regret": Value.of_repeats(regrets, "share")}
    report.add_cell(cell, found)


def options() -> argparse.ArgumentParser:
    return quick_parser(__doc__)


def main() -> None:
    asked = options().parse_args()
    report = Report("placement", asked)
    report.print_machine()
    for name in GRAPHS:
        for operators in (1_000, 10_000) if asked.quick else (1_000, 10_000, 100_000):
            speed(report, name, operators)
    for operators in (1_000, 5_000) if asked.quick else (1_000, 5_000, 20_000):
        program(report, operators)
    for kinds in KINDS:
        for name in GRAPHS:
            quality(report, name, kinds)
    for share in (0.7, 1.1):
        against_exact(report, share)
    for name in GRAPHS:
        curve(report, name, 200 if asked.quick else 2_000)
        for share in CAPS[::3] if asked.quick else CAPS:
            memory(report, name, share)
        for placer in BAECHI:
            profiles(report, name, placer)


if __name__ == "__main__":
    main()
