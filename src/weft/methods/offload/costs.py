"""The time of copies over the host link of a device, and the memory that they free and take again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.describe.plan import Choice
from weft.methods.offload.kinds import LOAD_ACTIVATIONS, RELEASE, ROOM, STORE_ACTIVATIONS, owed_by
from weft.methods.offload.options import ACTIVATIONS, STATES, offloaded
from weft.methods.offload.sizes import input_bytes, state_bytes
from weft.predict.cost.hooks import CostOf, Taken, by_table, takes_nothing
from weft.predict.cost.host_link import SOURCE, SPREAD, host_copy_s
from weft.predict.cost.memory import with_slack
from weft.predict.cost.price import TICK_S
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, KeptAway, LiveBytes, ResidentBytes
from weft.program.arrays import Ints
from weft.program.codes import codes
from weft.program.kinds import is_any_of
from weft.program.program import NONE


def _moved(pricing: Pricing, rows: Ints) -> Ints:
    """Return the bytes that each row moves, frees or takes on its rank, without slack."""
    columns, plan, graph = pricing.program.columns, pricing.plan, pricing.model.graph
    stages = range(len(plan.stages))
    staying = np.array([input_bytes(plan, graph, stage) for stage in stages], dtype=np.int64)
    leaving = np.maximum(pricing.placed.kept_bytes - staying[:, None], 0)
    states = np.array([state_bytes(plan, graph, stage) for stage in stages], dtype=np.int64)
    stage, of_rank = columns.stage[rows], pricing.placed.device_set_of_rank[columns.rank[rows]]
    moved: Ints = np.where(columns.micro_batch[rows] == NONE, states[stage], leaving[stage, of_rank])
    return moved


def _copy(pricing: Pricing, rows: Ints) -> Taken:
    sets = pricing.placed.device_set_of_rank[pricing.program.columns.rank[rows]]

    def copy_s(devices: int, moved_bytes: int) -> tuple[float, float, float]:
        each = (host_copy_s(device, moved_bytes) for device in pricing.placed.device_sets[devices])
        return max(each), 0.0, 0.0

    taken = by_table(copy_s, sets, _moved(pricing, rows))
    return taken._replace(spread=SPREAD, sources=frozenset({SOURCE}))


def _after_what_is_freed(pricing: Pricing, rows: Ints) -> Taken:
    """Return one tick for each row: a device frees memory first, and takes room for a copy out of it."""
    return takes_nothing(pricing, rows)._replace(occupancy=np.full(len(rows), TICK_S))


def _live(pricing: Pricing) -> Ints:
    kind = pricing.program.columns.kind
    change = np.zeros(len(kind), dtype=np.int64)
    for code, sign in ((RELEASE, -1), (ROOM, 1)):
        rows = np.flatnonzero(kind == code)
        if len(rows):
            change[rows] = sign * with_slack(_moved(pricing, rows))
    return change


def _states(pricing: Pricing) -> Ints:
    """Return the bytes of offloaded states of each rank."""
    held = np.zeros(pricing.program.ranks, dtype=np.int64)
    for stage in owed_by(pricing.program).states:
        size = state_bytes(pricing.plan, pricing.model.graph, stage)
        held[pricing.placed.ranks_of_stage[stage].ravel()] += size
    return held


def _away(pricing: Pricing) -> Held:
    """Return the states that are in host memory as a cycle begins, as negative bytes.

    These are taken in the cycle before they are freed. Others are freed first, and so begin on the device.
    """
    columns, held = pricing.program.columns, -_states(pricing)
    marks = np.flatnonzero(is_any_of(columns.kind, (RELEASE, ROOM)) & (columns.micro_batch == NONE))
    place = codes(columns.rank[marks], columns.stage[marks], columns.replica[marks])
    _, first = np.unique(place, return_index=True)
    begin = marks[first][columns.kind[marks[first]] == RELEASE]
    if len(begin):
        np.add.at(held, columns.rank[begin], _moved(pricing, begin))
    return Held(held)


def _stages_away(methods: Sequence[Choice], stages: int) -> tuple[Sequence[int], Sequence[int]]:
    of = offloaded(methods, stages)
    return of.states, of.activations


def _in_host(pricing: Pricing) -> Mapping[str, Ints]:
    """Return the most bytes of each rank in host memory; buffers of states stay there during the step."""
    columns = pricing.program.columns
    stores = np.flatnonzero(is_any_of(columns.kind, (STORE_ACTIVATIONS, LOAD_ACTIVATIONS)))
    change = np.where(columns.kind[stores] == STORE_ACTIVATIONS, 1, -1) * _moved(pricing, stores)
    held = {STATES: _states(pricing), ACTIVATIONS: np.zeros(pricing.program.ranks, dtype=np.int64)}
    for rank in np.unique(columns.rank[stores]).tolist():
        held[ACTIVATIONS][rank] = np.cumsum(change[columns.rank[stores] == rank]).max()
    return {word: one for word, one in held.items() if one.any()}


COSTS = (
    *(
        CostOf(kind=kind, hook=_copy)
        for kind in ("store_states", "load_states", "store_activations", "load_activations")
    ),
    CostOf(kind="release", hook=takes_nothing),
    CostOf(kind="room", hook=_after_what_is_freed),
    ResidentBytes(what="optimizer states in host memory", hook=_away),
    KeptAway(what="offload of optimizer states or activations", stages=_stages_away, held=_in_host),
    LiveBytes(what="copies from and to host memory", hook=_live),
)
