"""Costs of instructions by kind.

Each kind of instruction has a cost hook; the package that adds a kind contributes its hook (`weft.bundles`).
Hooks get all rows of their kind at once and look costs up by table, not by row. Each result has an
uncertainty and sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.synchronisation import AS_IT_IS, Wire, wire_of
from weft.errors import InputError, Violation
from weft.predict.cost.codec_times import CodecTime, codec_s
from weft.predict.cost.compute import StageTimes
from weft.predict.cost.exchanges import Exchanges
from weft.predict.cost.host_link import SOURCE, TRANSFER_SPREAD
from weft.predict.cost.network import CollectiveTime, Network
from weft.predict.cost.places import Spread
from weft.predict.cost.pricing import Pricing
from weft.program.arrays import Floats, Ints
from weft.program.codes import distinct_rows


class Taken(NamedTuple):
    """Costs of rows; arrays of shape (rows,).

    Attributes:
        occupancy: seconds on the row's own stream.
        latency: further seconds before dependent rows may start.
        link: seconds in which the row's bytes keep a link between nodes busy.
        spread: relative half-width of the 90 % interval of the least certain row.
        sources: origins of the seconds.
    """

    occupancy: Floats
    latency: Floats
    link: Floats
    spread: float = 0.0
    sources: frozenset[str] = frozenset()


CostHook = Callable[[Pricing, Ints], Taken]


@dataclass(frozen=True, kw_only=True)
class CostOf:
    """The cost of a kind of instruction; a method contributes it together with the kind."""

    kind: str
    hook: CostHook


@dataclass(frozen=True, kw_only=True)
class AddedWork:
    """Seconds that a method adds to a computation of another kind.

    `seconds` gets the number of the stage, its times on a device, and the exchanges of its replica's ranks.
    """

    kind: str
    seconds: Callable[[Pricing, int, StageTimes, Exchanges], float]


class Lead(NamedTuple):
    """Early starts of rows, before their inputs have ended; arrays of shape (rows,).

    Attributes:
        lead: seconds before the end of the inputs.
        rest: least seconds after that end, for a row with a lead.
    """

    lead: Floats
    rest: Floats


@dataclass(frozen=True, kw_only=True)
class LeadOf:
    """The lead of a kind of instruction, from the occupancy and link time of all rows of the program."""

    kind: str
    hook: Callable[[Pricing, Ints, Floats, Floats], Lead]


def hook_of(kind: str) -> CostHook:
    """Return the cost hook of a kind.

    Raises:
        InputError: when the kind has no hook, or several.
    """
    hooks: list[CostHook] = [
        one.hook for one in (*_COMPUTATIONS_AND_MESSAGES, *parts(CostOf)) if one.kind == kind
    ]
    if len(hooks) != 1:
        number = "no cost hook; contribute one" if not hooks else f"{len(hooks)} cost hooks"
        raise InputError(Violation("program", f"kind {kind!r} has {number}"))
    return hooks[0]


def by_table(seconds_of: Callable[..., tuple[float, float, float]], *keys: Ints) -> Taken:
    """Evaluate each distinct combination of `keys`, columns of one length, once.

    `seconds_of` returns occupancy, latency and link time.
    """
    first, which = distinct_rows(*keys)
    rows = zip(*(key[first].tolist() for key in keys), strict=True)
    table = np.array([seconds_of(*row) for row in rows]).reshape(-1, 3)
    return Taken(table[which, 0], table[which, 1], table[which, 2])


def computation(
    kind: str,
    seconds_of: Callable[[StageTimes], float],
    exchanged: Callable[[Exchanges], float] = lambda exchanges: 0.0,
    *,
    recomputes: bool = False,
) -> CostOf:
    """Return the cost of a computation kind: stage times, executor time and exchanges within the replica.

    `recomputes` is True if the kind repeats the forward pass of stages with recomputation.
    """

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        columns = pricing.program.columns
        sets = pricing.placed.device_set_of_rank[columns.rank[rows]]
        added = [one.seconds for one in parts(AddedWork) if one.kind == kind]

        def place_s(
            stage: int, replica: int, devices: int, completes: int, part: int
        ) -> tuple[float, float, float]:
            exchanges = pricing.exchanges_of(kind, stage, replica, part)
            each = pricing.times_of(kind, stage, replica, part, devices)
            half_widths.update(times.half_width for times in each)
            sources.update(times.source for times in each)
            seconds = max(
                pricing.in_program_s(
                    seconds_of(times) + sum(more(pricing, stage, times, exchanges) for more in added),
                    device,
                    speed,
                )
                for times, device, speed in zip(
                    each,
                    pricing.placed.device_sets[devices],
                    pricing.placed.speed_sets[devices],
                    strict=True,
                )
            )
            seconds += exchanged(exchanges)
            if recomputes and pricing.plan.stages[stage].recompute != "none":
                seconds += exchanges.again_s
            if completes:
                seconds += exchanges.gradient_s
            return seconds, 0.0, 0.0

        completes = pricing.completes_gradient[rows]
        keys = columns.stage[rows], columns.replica[rows], sets, completes, columns.part[rows]
        half_widths, sources = {pricing.placed.exchange_half_width}, set[str]()
        taken = by_table(place_s, *keys)
        return taken._replace(spread=max(half_widths), sources=frozenset(sources))

    return CostOf(kind=kind, hook=hook)


def message_cost(pricing: Pricing, rows: Ints) -> Taken:
    """Return the costs of messages; their senders bear them."""
    columns = pricing.program.columns

    def pair_s(rank: int, peer: int, moved_bytes: int) -> tuple[float, float, float]:
        occupancy, latency = pricing.placed.links.message_s(rank, peer, moved_bytes)
        return occupancy, latency, occupancy

    return carried(pricing, by_table(pair_s, columns.rank[rows], columns.peer[rows], columns.bytes[rows]))


def carried(pricing: Pricing, taken: Taken) -> Taken:
    """Return costs of transfers with the interval and the source of those through host memory."""
    if not pricing.model.through_host:
        return taken
    return taken._replace(spread=TRANSFER_SPREAD, sources=frozenset({SOURCE}))


TimeOf = Callable[[Network, Spread, int], CollectiveTime]


def collective_hook(
    time_of: Callable[[Pricing], TimeOf],
    bytes_of: Callable[[Pricing, Ints], Ints] = lambda pricing, rows: pricing.program.columns.bytes[rows],
) -> CostHook:
    """Return the cost hook of collectives, from the time of one alone on a distribution of ranks."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        return _collective(pricing, rows, time_of(pricing), AS_IT_IS, bytes_of(pricing, rows))

    return hook


def synchronising_hook(
    time_of: Callable[[Pricing], TimeOf],
    wire_of: Callable[[Plan], Wire] = wire_of,
    share_of: Callable[[Plan, LayerGraph, int], float] = lambda plan, graph, stage: 1.0,
) -> CostHook:
    """Return the cost hook of synchronising collectives, with their method's traffic and passes.

    `share_of` returns the bytes sent for each byte of a stage's rows, on top of those of the wire.
    """

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        wire, columns = wire_of(pricing.plan), pricing.program.columns
        stages, which = np.unique(columns.stage[rows], return_inverse=True)
        graph = pricing.model.graph
        shares = np.array([share_of(pricing.plan, graph, stage) for stage in stages.tolist()])
        moved_bytes = np.rint(columns.bytes[rows] * shares[which]).astype(np.int64)
        taken = _collective(pricing, rows, time_of(pricing), wire, moved_bytes)
        seconds = taken.occupancy
        if wire.passes:
            seconds = seconds + wire.passes * gradient_pass_s(pricing, rows)
        if wire.encoded or wire.decoded:
            seconds = seconds + codecs_s(pricing, rows, wire)
        return taken._replace(occupancy=seconds)

    return hook


def _collective(pricing: Pricing, rows: Ints, alone: TimeOf, wire: Wire, moved_bytes: Ints) -> Taken:
    columns, network = pricing.program.columns, pricing.model.network.carrying(wire)
    spreads_of = pricing.placed.links.spreads_of_group

    def group_s(group: int, moved_bytes: int) -> tuple[float, float, float]:
        one_round = max(alone(network, spread, moved_bytes // wire.rounds) for spread in spreads_of[group])
        taken = one_round.scaled(wire.rounds)
        # Flows in step take the time in which all their bytes keep the link busy, if it exceeds one flow's
        # own time: the others' bytes move while one waits.
        link_s = taken.link_s * int(pricing.placed.links.flows_of_group[group])
        return max(taken.seconds, link_s), 0.0, link_s

    used = {spread for group in set(columns.group[rows].tolist()) for spread in spreads_of[group]}
    half_width = max((network.half_width(spread) for spread in used), default=0.0)
    taken = by_table(group_s, columns.group[rows], moved_bytes)._replace(spread=half_width)
    return carried(pricing, taken)


def gradient_pass_s(pricing: Pricing, rows: Ints) -> Floats:
    """Return seconds in which the slowest device of each row reads the gradient that it steps once."""
    columns, placed = pricing.program.columns, pricing.placed
    sets = placed.device_set_of_rank[columns.rank[rows]]

    def place_s(stage: int, devices: int) -> tuple[float, float, float]:
        times = zip(placed.stage_times[stage, devices], placed.speed_sets[devices], strict=True)
        return max(one.read_gradients_s / speed for one, speed in times), 0.0, 0.0

    return by_table(place_s, columns.stage[rows], sets).occupancy


def codecs_s(pricing: Pricing, rows: Ints, wire: Wire, codec: CodecTime = codec_s) -> Floats:
    """Return seconds in which the slowest device of each row encodes and decodes what the row moves."""
    columns, placed, model = pricing.program.columns, pricing.placed, pricing.model

    def one_s(devices: int, moved_bytes: int) -> tuple[float, float, float]:
        values = wire.encoded * moved_bytes, wire.decoded * moved_bytes
        each = zip(placed.device_sets[devices], placed.speed_sets[devices], strict=True)
        return (
            max(codec(one, model.compute.measured(one), *values) / speed for one, speed in each),
            0.0,
            0.0,
        )

    return by_table(one_s, placed.device_set_of_rank[columns.rank[rows]], columns.bytes[rows]).occupancy


def takes_nothing(pricing: Pricing, rows: Ints) -> Taken:
    """Return zero costs, for instructions that only mark an event."""
    return Taken(np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows)))


# A segment runs a part of a pass; exchanges between segments are instructions of their own.
_FORWARD = partial(
    computation, seconds_of=lambda times: times.forward_s, exchanged=lambda exchanges: exchanges.forward_s
)
_BACKWARD_INPUT = partial(computation, exchanged=lambda exchanges: exchanges.backward_s, recomputes=True)
# The weight part of a backward pass needs nothing from other ranks, nor does the optimizer.
_BACKWARD_WEIGHT = partial(computation, seconds_of=lambda times: times.backward_weight_s)


def _input_s(times: StageTimes) -> float:
    return times.backward_input_s


def _both_s(times: StageTimes) -> float:
    return times.backward_input_s + times.backward_weight_s


_COMPUTATIONS_AND_MESSAGES: tuple[CostOf, ...] = (
    *map(_FORWARD, ("forward", "forward_segment")),
    *(_BACKWARD_INPUT(kind, _both_s) for kind in ("backward", "backward_segment")),
    *(_BACKWARD_INPUT(kind, _input_s) for kind in ("backward_input", "input_segment")),
    *map(_BACKWARD_WEIGHT, ("backward_weight", "weight_segment")),
    computation("step", lambda times: times.update_s),
    CostOf(kind="send_activation", hook=message_cost),
    CostOf(kind="send_gradient", hook=message_cost),
    # The sender bears the time of a message.
    CostOf(kind="receive_activation", hook=takes_nothing),
    CostOf(kind="receive_gradient", hook=takes_nothing),
)
