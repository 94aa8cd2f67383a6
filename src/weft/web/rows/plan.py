"""One plan as text: its cluster, its stages, the memory of its devices and the parts of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.layer import Layer
from weft.describe.layout_text import counts_text
from weft.describe.plan import Plan, Stage
from weft.describe.prediction import Prediction
from weft.describe.units import counted, format_bytes, format_seconds
from weft.timeline.figures import CODECS, COLLECTIVES, COPIES, MESSAGES

STAGE_HEAD = ("stage", "layers", "ranks", "recompute", "peak memory", "of the device's")
BREAKDOWN_HEAD = ("cause", "time of a mean rank", "of the step")
_WORDS = {
    COLLECTIVES: "collectives not hidden",
    CODECS: "codecs not hidden",
    COPIES: "copies not hidden",
    MESSAGES: "messages not hidden",
}
_TIGHT = 0.9


def stage_rows(
    plan: Plan, prediction: Prediction, cluster: Cluster, layers: Sequence[Layer]
) -> list[tuple[str, ...]]:
    """Return a row of `STAGE_HEAD` for each stage; memory is the total of its fullest rank.

    Neighbouring stages on the same ranks share a row, with the number of layers of each.
    """
    every = [
        (*_placed(stage, plan), *_fullest(stage, prediction.peak_bytes, cluster)) for stage in plan.stages
    ]
    rows: list[tuple[str, ...]] = []
    first = 0
    for cells, equal in groupby(every):
        stages = plan.stages[first : first + len(list(equal))]
        names = layers_text(sorted(layer for stage in stages for layer in stage.layers), layers)
        if len(stages) > 1:
            names += f" ({counts_text([len(stage.layers) for stage in stages])})"
        rows.append((spans(range(first, first + len(stages))), names, *cells))
        first += len(stages)
    return rows


# Tables and messages truncate the layers of a stage that takes them from more places.
_RUNS = 3


def layers_text(numbers: Sequence[int], layers: Sequence[Layer]) -> str:
    """Return ascending layers of a model by name: "embedding ... block.3", or several such runs."""
    starts = [place for place, number in enumerate(numbers) if place == 0 or numbers[place - 1] != number - 1]
    runs = [numbers[start:end] for start, end in pairwise([*starts, len(numbers)])]
    ends = [(layers[run[0]].name, layers[run[-1]].name) for run in runs[:_RUNS]]
    words = [first if first == last else f"{first} ... {last}" for first, last in ends]
    return ", ".join([*words, *(["..."] if len(runs) > _RUNS else [])])


def stage_names(plan: Plan, layers: Sequence[Layer]) -> list[tuple[str, str]]:
    """Return the name of each stage, and its layers and ranks in words."""
    return [
        (f"stage {index}", f"{layers_text(stage.layers, layers)}, {ranks_text(ranks_of(stage))}")
        for index, stage in enumerate(plan.stages)
    ]


def ranks_of(stage: Stage) -> list[int]:
    """Return the ranks of all replicas of a stage, ascending."""
    return sorted({rank for replica in stage.replicas for rank in replica.ranks})


def _placed(stage: Stage, plan: Plan) -> tuple[str, str]:
    """Return the ranks of a stage, with its replicas and tensor ranks where stages have unlike numbers, and
    recomputation."""
    ranks, copies = spans(ranks_of(stage)), len(stage.replicas)
    counts = [f"{counted(copies, 'replica')}"] if len(set(plan.replicas)) > 1 else []
    if plan.degree_words:
        widths = dict.fromkeys(len(copy.ranks) // (plan.cp * plan.ep) for copy in stage.replicas)
        counts.append(f"tp {'|'.join(map(str, widths))}")
    return f"{ranks} ({', '.join(counts)})" if counts else ranks, stage.recompute


def _fullest(stage: Stage, peaks: Sequence[int], cluster: Cluster) -> tuple[str, str]:
    shares = {rank: peaks[rank] / cluster.device_of(rank).memory_bytes for rank in ranks_of(stage)}
    fullest = max(shares, key=lambda rank: shares[rank])
    return format_bytes(peaks[fullest]), f"{shares[fullest]:.0%}"


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, with neighbours joined: 0-3, 6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


# More runs of ranks than this are not named one by one.
_RUNS = 4


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text: rank 3, ranks 0-3, ranks 0, 4, 8, 12 (4), ranks 0, 8, ... (16)."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = spans(ranks).split(", ")
    if len(runs) > _RUNS:
        runs = [*runs[:2], "..."]
    return f"ranks {', '.join(runs)}" + f" ({len(ranks)})" * (len(runs) > 1)


def batch_text(plan: Plan) -> str:
    """Return the samples of a step, with their tokens where they have several."""
    return f"{counted(plan.global_batch, 'sample')}" + f" of {plan.sequence} tokens" * (plan.sequence > 1)


def stages_by_rank(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the stages on each rank that the plan uses, ascending."""
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in ranks_of(stage):
            held[rank].append(index)
    return {rank: tuple(stages) for rank, stages in held.items()}


def nodes_text(group: NodeGroup) -> str:
    nodes = counted(group.count, "node")
    speeds = f", speeds {', '.join(f'{one:g}' for one in group.speeds)}" if group.speeds else ""
    device = group.device
    return f"{nodes} of {group.devices} {device.name} with {format_bytes(device.memory_bytes)}{speeds}"


def inside_text(group: NodeGroup) -> str:
    if group.devices == 1:
        return "one device to a node"
    return f"{format_bytes(round(group.link.bytes_per_s))}/s inside"


def link_rows(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    """Yield the links between nodes of a cluster: name, place, bandwidth and latency."""
    counts = {group.name: group.count for group in cluster.groups}
    for (one, other), link in sorted(cluster.links.items()):
        if one != other or counts.get(one, 0) > 1:
            speed = f"{format_bytes(round(link.bytes_per_s))}/s, {format_seconds(link.latency_s)}"
            yield one if one == other else f"{one} - {other}", "between nodes", speed


def memory_colour(share: float) -> str:
    """Return the word for the colour of a share of a device's memory."""
    return "red" if share > 1 else "yellow" if share > _TIGHT else "green"


@dataclass(frozen=True, slots=True)
class EqualRanks:
    """Neighbouring ranks with equal peaks and equal memories."""

    first: int
    count: int
    peak_bytes: int
    memory_bytes: int

    @property
    def name(self) -> str:
        return ranks_text(range(self.first, self.first + self.count))

    @property
    def share(self) -> float:
        return self.peak_bytes / self.memory_bytes

    @property
    def colour(self) -> str:
        return memory_colour(self.share)

    @property
    def words(self) -> str:
        return f"{format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)} ({self.share:.0%})"


def equal_ranks(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> list[EqualRanks]:
    """Return the peak and memory of each rank, with equal neighbours joined."""
    joined: list[EqualRanks] = []
    first = 0
    for (peak, memory), equal in groupby(zip(peak_bytes, memory_bytes, strict=True)):
        count = len(list(equal))
        joined.append(EqualRanks(first, count, peak, memory))
        first += count
    return joined


def breakdown_rows(causes: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return a row of `BREAKDOWN_HEAD` for each cause; `causes` are in seconds."""
    step_s = sum(causes.values())
    return [
        (
            _WORDS.get(name, name.replace("_", " ")),
            format_seconds(seconds),
            f"{seconds / step_s if step_s else 0.0:.1%}",
        )
        for name, seconds in causes.items()
    ]
