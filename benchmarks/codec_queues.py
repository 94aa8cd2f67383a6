"""The queues of two-way compression beside the simulated ones, and the rates of their instructions.

One process stands for one of two ranks. Codecs of a gradient work on one stream, its link on another, as the
Program orders them. The link takes a fixed time for each byte, and about as long as the codecs in total. The
simulator gets the times that the instructions took in the same round, so that other work on the machine
delays both. The fastest round counts, in which threads woke up soonest. Rates are CPU seconds of one thread.

    python benchmarks/codec_queues.py            # 16 pieces of 4 MB
    python benchmarks/codec_queues.py --quick    # 4 pieces of 1 MB
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from figures import Value
from harness import Report, quick_parser

from weft.methods.clan.kinds import EXCHANGE
from weft.methods.clan.options import NAME, ClanOptions
from weft.methods.clan.pieces import PiecedStages
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.build import build_training_program
from weft.program.kinds import CODEC, is_any_of
from weft.program.layout import PipelineLayout, StageLayout
from weft.program.program import Instruction, Program
from weft.program.schedules import get_schedule
from weft.run.streams import THERE
from weft.run.streams import Value as Made
from weft.run.work_queue import WorkQueue
from weft.sync.base import Group, Meeting, ParameterPlace
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser

RANKS, ROUNDS, TARGET, TICK_S = 2, 15, 0.10, 1e-9
# Each codec with its other keys.
CELLS: Mapping[str, Mapping[str, object]] = {
    "scaled-sign": {"codec": "scaled-sign"},
    "top-k, 1 of 1000": {"codec": "top-k"},
    "random-k, 1 of 1000": {"codec": "random-k"},
    "linear-dithering, 8 bits": {"codec": "linear-dithering"},
    "linear-dithering, 7 bits": {"codec": "linear-dithering", "bits": 7},
    "natural-dithering, 8 bits": {"codec": "natural-dithering"},
    "fp16": {"codec": "fp16"},
    "fp32": {"codec": "fp32"},
}


def options() -> argparse.ArgumentParser:
    return quick_parser(__doc__)


class PacedLink:
    """A group of two ranks, of which this one gets its own payloads back after the time of the others'."""

    size, place = RANKS, 0

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        self._wait(given.nbytes / RANKS)
        taken.copy_(given)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        self._wait(share.nbytes)
        flat.view(RANKS, -1).copy_(share)

    def _wait(self, sent_bytes: float) -> None:
        time.sleep((RANKS - 1) * sent_bytes / self.bytes_per_s)


class Exchange:
    """The exchange of one stage's gradient on one rank, by the instructions of its program."""

    def __init__(self, table: ClanOptions, pieces: int, elements: int) -> None:
        self.program = program_of(table, pieces, 4 * elements)
        rows = np.flatnonzero(is_any_of(self.program.columns.kind, EXCHANGE))
        rows = rows[self.program.columns.rank[rows] == 0]
        self.rows = rows.tolist()
        self.instructions = [self.program.instruction(row) for row in self.rows]
        self.link = PacedLink(1e12)
        # Exchanges call nothing else of a group.
        self.group = cast(Group, self.link)
        self.sums = TwoWaySums(table)
        self.sums.lay_out(0, [ParameterPlace(0, (elements,))])
        self.sums.cut(0, pieces, self.group)
        self.gradient = torch.randn(elements)
        self.sums.begin(0, torch.zeros_like(self.gradient))

    def work(self, instruction: Instruction) -> None:
        meeting = Meeting(group=self.group, stage=0, part=instruction.part)
        getattr(self.sums, instruction.kind.name)(self.gradient, meeting)

    def alone_s(self) -> Mapping[str, float]:
        """CPU seconds of each kind of instruction, one after the other on this thread."""
        found: dict[str, float] = defaultdict(float)
        for instruction in self.instructions:
            begin = time.thread_time()
            self.work(instruction)
            found[instruction.kind.name] += time.thread_time() - begin
        return found

    def queued_s(self) -> tuple[float, list[float]]:
        """Seconds from the first to the last instruction on two streams, and those of each instruction."""
        streams = {CODEC: WorkQueue(CODEC), "collective": WorkQueue("collective")}
        made: dict[int, Made[None]] = {}
        each_s = [0.0] * len(self.instructions)

        def timed(place: int, instruction: Instruction) -> None:
            begin = time.perf_counter()
            self.work(instruction)
            each_s[place] = time.perf_counter() - begin

        begin = time.perf_counter()
        for place, instruction in enumerate(self.instructions):
            read, stream = made.get(instruction.part, THERE), streams[instruction.kind.stream]
            done = stream.run(str(instruction), partial(timed, place, instruction), read)
            made[instruction.part] = Made.of(None, done)
        for one in made.values():
            one.completion.wait()
        seconds = time.perf_counter() - begin
        for stream in streams.values():
            stream.close()
        return seconds, each_s

    def simulated_s(self, each_s: list[float]) -> float:
        """The same in the simulator; both ranks take the seconds of this one."""
        occupancy = np.zeros(len(self.program), dtype=np.int64)
        columns, of = self.program.columns, dict(zip(self._keys(self.rows), each_s, strict=True))
        for row in np.flatnonzero(is_any_of(columns.kind, EXCHANGE)).tolist():
            occupancy[row] = round(of[self._keys([row])[0]] / TICK_S)
        nothing = np.zeros_like(occupancy)
        free = np.zeros(self.program.ranks, dtype=np.bool_)
        costs = Costs(
            occupancy=occupancy,
            latency=nothing,
            tick_s=TICK_S,
            synchronous=free,
            live_bytes=nothing,
            base_bytes=free.astype(np.int64),
        )
        return simulate(self.program, costs, max_cycles=1).first_step_s

    def _keys(self, rows: list[int]) -> list[tuple[int, int]]:
        columns = self.program.columns
        return [(int(columns.kind[row]), int(columns.part[row])) for row in rows]


def program_of(table: ClanOptions, pieces: int, gradient_bytes: int) -> Program:
    """The program of one stage with two replicas."""
    stage = StageLayout(replicas=tuple((rank,) for rank in range(RANKS)), gradient_bytes=gradient_bytes)
    layout = PipelineLayout(stages=(stage,), micro_batches=(1,) * RANKS, message_bytes={})
    methods = {NAME: PiecedStages(table, (pieces,), (gradient_bytes,))}
    return build_training_program(layout, get_schedule("gpipe"), {}, methods=methods)


def in_queues(exchange: Exchange, codecs_s: float, sent_bytes: int) -> dict[str, Value]:
    """Measured and simulated seconds of the fastest round."""
    exchange.link.bytes_per_s = sent_bytes / codecs_s
    rounds = []
    for _ in range(ROUNDS):
        measured_s, each_s = exchange.queued_s()
        rounds.append((exchange.simulated_s(each_s) / measured_s - 1.0, measured_s))
    error, measured_s = min(rounds, key=lambda one: one[1])
    return {
        "measured": Value(measured_s, "s"),
        "simulated": Value((1.0 + error) * measured_s, "s"),
        "error": Value(error, "share", TARGET, abs(error) <= TARGET),
    }


def rates(alone: Mapping[str, float], elements: int) -> dict[str, Value]:
    """Bytes of gradients a second, and seconds as multiples of those in which the quantiser encodes them."""
    codec, key = Quantiser(bits=4, group=128, smooth=True), Key.of(0, "benchmark")
    numbers, payload = torch.randn(elements), torch.zeros(codec.payload_bytes(elements), dtype=torch.uint8)
    codec.encode(numbers, payload, key)
    begin = time.thread_time()
    codec.encode(numbers, payload, key)
    encode_s = time.thread_time() - begin
    begin = time.thread_time()
    codec.decode(payload, numbers)
    decode_s = time.thread_time() - begin
    of = {"compress": encode_s, "aggregate": decode_s, "decompress": decode_s}
    found = {name: Value(4 * elements / alone[name], "bytes") for name in of}
    return found | {
        f"{name}, of the quantiser": Value(alone[name] / seconds, "ratio") for name, seconds in of.items()
    }


def main() -> None:
    asked = options().parse_args()
    report = Report("codec_queues", asked)
    report.print_machine()
    pieces, elements = (4, 1 << 20) if asked.quick else (16, 1 << 24)
    for name, keys in CELLS.items():
        table = ClanOptions.model_validate(keys)
        sent = 2 * pieces * table.payload_bytes(-(-elements // (pieces * RANKS * table.block)))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cell = f"{name}; {threads} thread{'s' * (threads > 1)}"
            if not report.missing(cell):
                continue
            exchange = Exchange(table, pieces, elements)
            exchange.alone_s()
            alone = exchange.alone_s()
            codecs_s = sum(alone[kind] for kind in ("compress", "aggregate", "decompress"))
            told = rates(alone, elements) if threads == 1 else {}
            report.add_cell(cell, in_queues(exchange, codecs_s, sent) | told)


if __name__ == "__main__":
    main()
