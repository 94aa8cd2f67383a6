"""One plan as text: its cluster, its stages, the memory of its devices and the parts of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.plan import Plan, Stage
from weft.describe.prediction import Prediction
from weft.describe.units import format_bytes, format_seconds
from weft.timeline.figures import CODECS, COLLECTIVES, COPIES, MESSAGES

STAGE_HEAD = ("stage", "layers", "ranks", "recompute", "peak memory", "of the device's")
BREAKDOWN_HEAD = ("cause", "seconds of a mean rank", "of the step")
_WORDS = {
    COLLECTIVES: "collectives not hidden",
    CODECS: "codecs not hidden",
    COPIES: "copies not hidden",
    MESSAGES: "messages not hidden",
}
_TIGHT = 0.9


def stage_rows(plan: Plan, prediction: Prediction, cluster: Cluster) -> list[tuple[str, ...]]:
    """Return a row of `STAGE_HEAD` for each stage; memory is the total of its fullest rank."""
    return [_row(index, stage, prediction.peak_bytes, cluster) for index, stage in enumerate(plan.stages)]


def _row(index: int, stage: Stage, peaks: Sequence[int], cluster: Cluster) -> tuple[str, ...]:
    ranks = sorted(rank for replica in stage.replicas for rank in replica.ranks)
    cells = (str(index), spans(stage.layers), spans(ranks), stage.recompute)
    fullest = max(ranks, key=lambda rank: peaks[rank] / cluster.device_of(rank).memory_bytes)
    share = peaks[fullest] / cluster.device_of(fullest).memory_bytes
    return (*cells, format_bytes(peaks[fullest]), f"{share:.0%}")


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, with neighbours joined: 0-3, 6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def stages_by_rank(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return the stages on each rank that the plan uses, ascending."""
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in sorted({rank for replica in stage.replicas for rank in replica.ranks}):
            held[rank].append(index)
    return {rank: tuple(stages) for rank, stages in held.items()}


def nodes_text(group: NodeGroup) -> str:
    nodes = "1 node" if group.count == 1 else f"{group.count} nodes"
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


@dataclass(frozen=True, slots=True)
class EqualRanks:
    """Neighbouring ranks with equal peaks and equal memories."""

    first: int
    count: int
    peak_bytes: int
    memory_bytes: int

    @property
    def name(self) -> str:
        last = self.first + self.count - 1
        return f"rank {self.first}" if self.count == 1 else f"ranks {self.first}-{last}"

    @property
    def share(self) -> float:
        return self.peak_bytes / self.memory_bytes

    @property
    def colour(self) -> str:
        return "red" if self.share > 1 else "yellow" if self.share > _TIGHT else "green"

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
