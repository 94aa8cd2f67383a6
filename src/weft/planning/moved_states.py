"""The states that devices must receive when a job goes on under another plan: their bytes and the seconds.

States are weights, masters and the optimizer's. Gradients begin anew with each step. A rank has its states
as ranges of every layer's parameters, which replicas that shard them cut (see `weft.run.state.shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import rustworkx

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.predict.cost.memory import SHARDINGS, copied_parameters, frozen_bytes, plan_states, shards_copies
from weft.predict.cost.network import Network

# A few disks in a row, or a fast network to a storage; nobody has said which.
CHECKPOINT_BYTES_PER_S = 1e9

Range = tuple[int, int]


class StatePiece(NamedTuple):
    """One kind of states of a layer, or of the tied parameters behind the layers, by their number."""

    kind: str
    unit: int
    element_bytes: int


Holdings = Mapping[int, Mapping[StatePiece, Range]]
"""For each rank, the range of elements that it has of each piece."""


@dataclass(frozen=True, kw_only=True)
class MovedStates:
    """The states that the devices of a plan receive.

    Attributes:
        received_bytes: by rank, from other devices and from the checkpoint.
        lost_bytes: those of them that no remaining device has, so that they come from the checkpoint.
        seconds: of the device that receives or sends for the longest time.
    """

    received_bytes: tuple[int, ...]
    lost_bytes: int
    seconds: float

    def __repr__(self) -> str:
        return one_line(self, f"{format_bytes(self.total_bytes)} in {format_seconds(self.seconds)}")

    @property
    def total_bytes(self) -> int:
        """The bytes that all devices receive."""
        return sum(self.received_bytes)


def holdings(plan: Plan, graph: LayerGraph) -> Holdings:
    """Return the states of every rank of a plan.

    Raises:
        InputError: when the plan divides states in a way that is not counted.
    """
    if violations := uncounted(plan):
        raise InputError(violations)
    found: dict[int, dict[StatePiece, Range]] = {}
    for index, stage in enumerate(plan.stages):
        for number, copy in enumerate(stage.replicas):
            (rank,) = copy.ranks
            mine = found.setdefault(rank, {})
            for piece, held in _of_replica(plan, graph, index, number):
                # A rank with copies of tied parameters in two stages keeps the larger share of them.
                mine[piece] = max(held, mine.get(piece, held), key=lambda one: one[1] - one[0])
    return found


def uncounted(plan: Plan) -> list[Violation]:
    """Return the reasons why the states of a plan's ranks cannot be counted; empty if they can."""
    found = []
    widths = {len(copy.ranks) for stage in plan.stages for copy in stage.replicas}
    if widths != {1}:
        problem = f"replicas of {max(widths)} ranks: parts of layers are not counted by rank"
        found.append(Violation("plan: mesh", f"{problem}, which tensor, context and expert ranks have", "1"))
    if plan.island is not None:
        problem = f"{plan.island}: shards of islands are not counted by rank"
        found.append(Violation("plan: island", problem))
    if plan.optimizer.orthogonalisations:
        problem = "matrices have other states than other parameters, which are not counted by layer"
        found.append(Violation("plan: optimizer", problem, "adamw"))
    return found


def _of_replica(plan: Plan, graph: LayerGraph, index: int, number: int) -> Iterator[tuple[StatePiece, Range]]:
    """Yield the pieces of a replica of a stage, each with the range that its rank has."""
    states, layers, shape = plan_states(plan), plan.stages[index].layers, plan.shape(index)
    level, sharers = SHARDINGS.index(plan.sharding), plan.sharers(index)
    units = dict(_units(graph, layers, plan))
    copied = {len(graph.layers) + graph.tied.index(one) for one in copied_parameters(graph, layers)}
    whole = set() if shards_copies(plan) else copied
    share = -(-sum(count for unit, count in units.items() if unit not in whole) // sharers)
    start, mine = 0, number % sharers
    for unit, count in units.items():
        cut = (0, count)
        if unit not in whole:
            first, last = (min(max(place * share - start, 0), count) for place in (mine, mine + 1))
            cut, start = (first, last), start + count
        yield StatePiece("optimizer", unit, states.optimizer), cut if level >= 1 else (0, count)
        yield (
            StatePiece("weights", unit, states.weights),
            cut if level >= SHARDINGS.index("zero-3") else (0, count),
        )
    for layer in layers:
        if frozen := frozen_bytes(graph, [layer], shape, plan.element_bytes):
            yield StatePiece("frozen", layer, 1), (0, frozen)


def _units(graph: LayerGraph, layers: Sequence[int], plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield the trained parameters of layers in their order, and each tied one where it is used first."""
    shape = plan.shape(0)
    tied: dict[int, float] = defaultdict(float)
    for one in graph.tied:
        tied[one.layers[0]] += one.parameters(shape)
    amounts, seen = graph.amounts("parameters", shape), set()
    for layer in layers:
        yield layer, round(amounts[layer] - tied[layer])
        for number, one in enumerate(graph.tied):
            if layer in one.layers and number not in seen:
                seen.add(number)
                yield len(graph.layers) + number, round(one.parameters(shape))


def moved_states(held: Holdings, needed: Holdings, ranks: int, network: Network) -> MovedStates:
    """Return what each of the ranks must receive to have the states of `needed`.

    A range comes from the device that then is the first to have sent it, else from the checkpoint.
    """
    sources: dict[StatePiece, list[int]] = defaultdict(list)
    for rank, pieces in held.items():
        for piece in pieces:
            sources[piece].append(rank)
    messages: dict[tuple[int, int], int] = defaultdict(int)
    sending, read = [0.0] * ranks, [0] * ranks
    for rank in sorted(needed):
        for piece, whole in needed[rank].items():
            missing = _cut([whole], held.get(rank, {}).get(piece))
            size = _length(missing) * piece.element_bytes

            def ends_s(source: int, rank: int = rank, size: int = size) -> tuple[float, int]:
                return sending[source] + sum(network.message_s(source, rank, size)), source

            for source in sorted(sources[piece], key=ends_s) if missing else ():
                left = _cut(missing, held[source][piece])
                sent_bytes = (_length(missing) - _length(left)) * piece.element_bytes
                if sent_bytes:
                    sending[source] += network.message_s(source, rank, sent_bytes)[0]
                    messages[source, rank] += sent_bytes
                missing = left
            read[rank] += _length(missing) * piece.element_bytes
    received, busy_s = [*read], [[0.0, bytes_read / CHECKPOINT_BYTES_PER_S] for bytes_read in read]
    for (source, rank), sent_bytes in messages.items():
        received[rank] += sent_bytes
        seconds = sum(network.message_s(source, rank, sent_bytes))
        busy_s[source][0] += seconds
        busy_s[rank][1] += seconds
    longest_s = max(max(each) for each in busy_s)
    return MovedStates(received_bytes=tuple(received), lost_bytes=sum(read), seconds=longest_s)


def on_equal_devices(plan: Plan, job: Job, held: Holdings) -> Plan:
    """Return the plan with equal devices in those places where they have the most states already.

    Devices are equal if they have the same speed and links: those of a node, and nodes of one device.
    """
    needed, cluster = holdings(plan, job.graph), job.cluster
    alike: dict[tuple[object, float], list[int]] = defaultdict(list)
    for rank in needed:
        group, node = cluster.group_index_of(rank), cluster.node_of(rank)
        alike[group if cluster.groups[group].devices == 1 else node, cluster.speed_of(rank)].append(rank)
    device_of: dict[int, int] = {}
    for ranks in alike.values():
        device_of |= _matched({rank: needed[rank] for rank in ranks}, held)
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    copy.model_copy(update={"ranks": tuple(device_of[rank] for rank in copy.ranks)})
                    for copy in stage.replicas
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def _matched(needed: Holdings, held: Holdings) -> dict[int, int]:
    """Return the device for the place of each rank, so that all together have the most bytes already."""
    ranks, count = list(needed), len(needed)
    pairs = rustworkx.PyGraph(multigraph=False)
    pairs.add_nodes_from(range(2 * count))
    for place, rank in enumerate(ranks):
        for other, device in enumerate(ranks):
            shared = _shared_bytes(held.get(device, {}), needed[rank])
            # Of equal matchings, the one that leaves more ranks where they are.
            pairs.add_edge(place, count + other, 2 * count * shared + (rank == device))
    found = rustworkx.max_weight_matching(pairs, max_cardinality=True, weight_fn=int)
    return {ranks[min(pair)]: ranks[max(pair) - count] for pair in found}


def _shared_bytes(held: Mapping[StatePiece, Range], needed: Mapping[StatePiece, Range]) -> int:
    """Return the bytes of needed ranges that are held."""
    missing = {piece: _cut([whole], held.get(piece)) for piece, whole in needed.items()}
    return sum(
        (_length([whole]) - _length(missing[piece])) * piece.element_bytes for piece, whole in needed.items()
    )


def _cut(ranges: Sequence[Range], held: Range | None) -> list[Range]:
    """Return the parts of ranges outside another one."""
    first, last = held or (0, 0)
    parts = (
        ((low, min(high, first)) for low, high in ranges),
        ((max(low, last), high) for low, high in ranges),
    )
    return [one for each in parts for one in each if one[0] < one[1]] if first < last else [*ranges]


def _length(ranges: Sequence[Range]) -> int:
    return sum(last - first for first, last in ranges)
