"""Layer profiles that lack micro-batch sizes: errors of a step's passes by the distance to the measured ones.

All sizes are measured once. Then a profile keeps one size, or two neighbours, and predicts the others.

    python benchmarks/profile_sizes.py [MODEL ...]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from figures import Value
from harness import Report, parser

from weft.capture.measure import measure
from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.this_machine import this_machine
from weft.predict.cost.compute import PROFILE_HALF_WIDTH, ComputeModel
from weft.predict.cost.profiled import HALF_WIDTHS_OF_AN_OCTAVE
from weft.predict.profile import LayerProfile, MachineMeasurement

MODELS, SIZES, SEQUENCE = (
    ("gpt-1m", "llama-1m", "bert-1m", "vit-tiny", "resnet-tiny"),
    (1, 2, 4, 8, 16, 32),
    128,
)
# A group of errors; octaves between the predicted size and the nearest measured one; an error.
Found = tuple[str, float, float]


class Passes:
    """The seconds of a model's passes by a profile, or by parts of it."""

    def __init__(self, graph: LayerGraph, machine: MachineMeasurement, profile: LayerProfile) -> None:
        self._graph, self._machine, self._profile = graph, machine, profile
        self._device = this_machine().groups[0].device

    def seconds(self, size: int, kept: Collection[int] = SIZES) -> float:
        """Return the seconds at a micro-batch size by the rows of the kept sizes."""
        rows = tuple(one for one in self._profile.timings if one.micro_batch_size in kept)
        compute = ComputeModel(machine=self._machine, profile=replace(self._profile, timings=rows))
        layers, shape = range(len(self._graph.layers)), Shape(size, self._graph.sequence)
        return compute.stage_times(self._graph, layers, shape, self._profile.precision, self._device).passes_s


def found_of(passes: Passes) -> Iterator[Found]:
    """Yield errors by the measured sizes that a profile keeps, and those of a profile in proportion."""
    truth = {size: passes.seconds(size) for size in SIZES}

    def error(seconds: float, size: int) -> float:
        return seconds / truth[size] - 1.0

    kept: dict[str, list[tuple[int, ...]]] = {
        "one size": [(one,) for one in SIZES],
        "two sizes": [*pairwise(SIZES)],
        "four sizes": [SIZES[first : first + 4] for first in range(len(SIZES) - 3)],
    }
    for group, rows in kept.items():
        for sizes in rows:
            for size in SIZES:
                if not sizes[0] <= size <= sizes[-1]:
                    near = sizes[0] if size < sizes[0] else sizes[-1]
                    octaves = abs(math.log2(size / near))
                    yield group, octaves, error(passes.seconds(size, sizes), size)
                    if group == "one size":
                        yield "in proportion", octaves, error(truth[near] * size / near, size)
    for left, size, right in zip(SIZES, SIZES[1:], SIZES[2:], strict=False):
        yield "between two sizes", 0.0, error(passes.seconds(size, (left, right)), size)


def measured(model: str) -> list[Found]:
    """Measure a model's layers and return the errors of profiles that lack sizes."""
    config = resolve_model(model)
    if config.reads_tokens:
        config = resolve_model(model, sequence=SEQUENCE)
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(config, micro_batch_sizes=SIZES, home=Path(folder))
    assert taken.profile is not None, "a model is measured"
    return list(found_of(Passes(layer_graph(config), taken.machine, taken.profile)))


def figures(found: Sequence[Found]) -> Mapping[str, Value]:
    """Return mean and largest errors by group and distance, and the coverage of the declared intervals."""
    by_distance: dict[tuple[str, float], list[float]] = defaultdict(list)
    for group, octaves, error in found:
        by_distance[group, octaves].append(abs(error))
    values: dict[str, Value] = {}
    for (group, octaves), errors in sorted(by_distance.items()):
        name = f"{group}, {octaves:g} octaves" if octaves else group
        values[f"{name}: mean error"] = Value(statistics.mean(errors), "share")
        values[f"{name}: largest error"] = Value(max(errors), "share")
    for group in ("one size", "two sizes", "four sizes"):
        octave = HALF_WIDTHS_OF_AN_OCTAVE[group == "one size"]
        inside = [
            abs(error) <= PROFILE_HALF_WIDTH + octave * octaves
            for one, octaves, error in found
            if one == group
        ]
        values[f"{group}: inside the declared intervals"] = Value(statistics.mean(inside), "share")
    return values


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("models", nargs="*", default=MODELS)
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("profile_sizes", asked)
    report.print_machine()
    found: list[Found] = []
    for model in asked.models:
        if report.missing(model):
            own = measured(model)
            report.add_cell(model, figures(own))
            found += own
    if found and report.missing("all"):
        report.add_cell("all", figures(found))


if __name__ == "__main__":
    main()
