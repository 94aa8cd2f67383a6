"""The pieces of a stage's gradient and the bytes that replicas send, as far as a model's graph tells.

A graph has the sides of the matrices that layers multiply tokens with. It joins the products of one input,
such as queries, keys and values. A model may hold these as several matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import SERVERS, Choice, Plan
from weft.describe.servers import hosts_behind
from weft.describe.synchronisation import SyncMethod, Wire, options_in
from weft.methods.clan.options import CODECS, FP32_BYTES, NAME, ClanOptions, PiecePlace
from weft.methods.power_sgd.traffic import matrices_of
from weft.predict.cost.memory import own_parameters, plan_states
from weft.program.arrays import Ints
from weft.program.program import Program


def compressed_elements(options: ClanOptions, plan: Plan, graph: LayerGraph, stage: int) -> int:
    """Return the gradients of one rank's parameters that are large enough to be compressed."""
    layers, shape = plan.stages[stage].layers, plan.shape(stage)
    sizes = (rows * columns for rows, columns in matrices_of(graph, layers, shape))
    return sum(size for size in sizes if FP32_BYTES * size >= options.minimum_bytes)


@dataclass(frozen=True, slots=True)
class PiecedStages:
    """The options of a plan, and by stage the number of pieces and the bytes of all, not encoded."""

    options: ClanOptions
    pieces: tuple[int, ...]
    piece_bytes: tuple[int, ...]

    @property
    def missing(self) -> list[PiecePlace]:
        """The pieces with a codec of their own that no stage has."""
        counts = dict(enumerate(self.pieces))
        return [one for one in self.options.codec_of_piece if one.part >= counts.get(one.stage, 0)]

    @classmethod
    def of(cls, plan: Plan, graph: LayerGraph) -> PiecedStages | None:
        """Return those of a plan; None if it has another `sync`."""
        options = options_in(plan, NAME, ClanOptions)
        if options is None:
            return None
        sizes = [compressed_elements(options, plan, graph, stage) for stage in range(len(plan.stages))]
        pieces = tuple(max(1, -(-FP32_BYTES * size // options.piece_bytes)) for size in sizes)
        return cls(options, pieces, tuple(_element_bytes(plan) * size for size in sizes))


def plans_of_codecs(plan: Plan, program: Program, rows: Ints) -> Iterator[tuple[Plan, Ints]]:
    """Yield, for each codec, the plan as if all pieces had it, and the rows of its pieces."""
    options, columns = _options_of(plan), program.columns
    codec_of, left = options.codec_of_piece, np.ones(len(rows), dtype=np.bool_)
    if not codec_of:
        yield plan, rows
        return
    for codec in sorted(set(codec_of.values()) - {options.codec}):
        mine = np.zeros(len(rows), dtype=np.bool_)
        for piece in (one for one, its in codec_of.items() if its == codec):
            mine |= (columns.stage[rows] == piece.stage) & (columns.part[rows] == piece.part)
        left &= ~mine
        yield _with_options(plan, options.all_with(codec)), rows[mine]
    yield _with_options(plan, options.all_with(options.codec)), rows[left]


def _with_options(plan: Plan, options: ClanOptions) -> Plan:
    keys = options.model_dump(exclude_defaults=True)
    return plan.model_copy(update={"sync": Choice(name=NAME, options=keys)})


def exchange_wire(plan: Plan) -> Wire:
    """Return the communication of a push or a pull for each byte of its piece."""
    options = _options_of(plan)
    sent = options.block_bytes / (options.block * _element_bytes(plan))
    return Wire(inside=sent, between=sent)


def compress_wire(plan: Plan) -> Wire:
    """Return the work of a `compress` for each byte of its piece."""
    return Wire(inside=0.0, between=0.0, encoded=_options_of(plan).times.compress / _element_bytes(plan))


def aggregate_wire(plan: Plan) -> Wire:
    """Return the work of an `aggregate` for each byte of its piece, of which a rank owns a share.

    A replica decodes as many bytes as the piece has, and a server its share of all replicas' pieces.
    """
    decoded = _options_of(plan).times.aggregate / _element_bytes(plan)
    pieces = len(plan.stages[0].replicas) / len(plan.servers) if plan.servers else 1.0
    return Wire(inside=0.0, between=0.0, decoded=pieces * decoded)


def decompress_wire(plan: Plan) -> Wire:
    """Return the work of a `decompress` for each byte of its piece."""
    return Wire(inside=0.0, between=0.0, decoded=_options_of(plan).times.decompress / _element_bytes(plan))


def _element_bytes(plan: Plan) -> int:
    return plan_states(plan).gradients


def _options_of(plan: Plan) -> ClanOptions:
    options = options_in(plan, NAME, ClanOptions)
    assert options is not None, "only this method has pieces"
    return options


def _whole_share(options: ClanOptions, plan: Plan, graph: LayerGraph, stage: int) -> float:
    """Return the share of a stage's gradient that its reduction sends whole."""
    own = own_parameters(graph, plan.stages[stage].layers, plan.shape(stage))
    return 1.0 - compressed_elements(options, plan, graph, stage) / own if own else 1.0


def _proposals(job: Job) -> list[Mapping[str, Any]]:
    """Return 8 and 4 bits, one bit, and one number of a thousand; also on servers, where there are hosts."""
    each: list[Mapping[str, Any]] = [{}, {"bits": 4}, {"codec": "scaled-sign"}, {"codec": "top-k"}]
    hosts = hosts_behind(job.cluster)
    return each + ([{**one, SERVERS: hosts} for one in each] if hosts else [])


def _other_codecs(options: ClanOptions, stage: int, part: int) -> list[Mapping[str, Any]]:
    """Return the keys of each codec that sends no fewer bits, and with which ranks keep errors as before.

    Fewer bits might change how well training goes.
    """
    piece, now = PiecePlace(stage, part), options.of_piece(stage, part)
    each = [
        options.with_piece(piece, one)
        for one in CODECS
        if one != now.codec and options.all_with(one).block_bytes >= now.block_bytes
    ]
    return [keys for keys in each if options.model_copy(update=keys).keeps_errors == options.keeps_errors]


SYNC = SyncMethod(
    name=NAME,
    table=ClanOptions,
    sent_share=_whole_share,
    proposals=_proposals,
    codecs=_other_codecs,
)
