"""The life of one value, from the write that begins it to the read that ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.errors import Violation
from weft.program.arrays import Ints, Mask
from weft.program.checks.order import Order
from weft.program.checks.report import name, violations
from weft.program.codes import codes, numbered
from weft.program.program import Program
from weft.program.values import Read, ValueKind

EACH, FIRST, LAST, _WAITS = 0, 1, 2, 3
CONSUMES = 4
# The highest flag: an instruction that reads and writes a value reads it first.
WRITES = 8
_FLAG_BITS = 4


def waits_flag(read: Read) -> int:
    """Return the flag of `Read.waits`."""
    return {"each": EACH, "first": FIRST, "last": LAST}[read.waits]


@dataclass(frozen=True)
class Uses:
    """Uses of one value; uses at the same coordinates are adjacent.

    Attributes:
        row, flag: the instruction and its use: `WRITES`, or a read's wait with `CONSUMES` for a last read.
        first, last: index of the first and the last use at the same coordinates.
        place: number of the coordinates.
    """

    row: Ints
    flag: Ints
    first: Ints
    last: Ints
    place: Ints
    _places: Ints
    _coordinates: Mapping[str, Ints]

    @classmethod
    def sort(cls, row: Ints, flag: Ints, time: Ints, coordinates: Mapping[str, Ints]) -> Uses:
        """Sort uses by coordinates, then by time, then by row.

        The sort uses one integer per use, because this is several times faster than a sort of indices.
        """
        place = codes(*coordinates.values())
        row_bits = int(row.max(initial=0)).bit_length()
        time_bits = int(time.max(initial=0)).bit_length()
        bits = _FLAG_BITS + row_bits + time_bits
        if int(place.max(initial=0)).bit_length() + bits > 62:
            place = np.unique(place, return_inverse=True)[1].astype(np.int64)
        key = (((place << time_bits | time) << row_bits | row) << _FLAG_BITS) | flag
        key.sort()
        at = key >> bits
        index = np.arange(len(key), dtype=np.int64)
        opens = np.append(True, at[1:] != at[:-1])[: len(key)]
        first = np.maximum.accumulate(np.where(opens, index, 0))
        ends = np.append(np.flatnonzero(opens)[1:], len(key)) - 1
        return cls(
            row=key >> _FLAG_BITS & (1 << row_bits) - 1,
            flag=key & (1 << _FLAG_BITS) - 1,
            first=first,
            last=ends[np.cumsum(opens) - 1],
            place=at,
            _places=place,
            _coordinates=coordinates,
        )

    @property
    def writes(self) -> Mask:
        return self.flag >= WRITES

    @property
    def consumes(self) -> Mask:
        consumes: Mask = self.flag & CONSUMES != 0
        return consumes

    @property
    def waits(self) -> Ints:
        return self.flag & _WAITS

    def coordinate(self, index: int, name: str) -> int:
        """Return a coordinate of a use's value."""
        one = int(np.flatnonzero(self._places == self.place[index])[0])
        return int(self._coordinates[name][one])


_WHERE = "values"


class _Words:
    """Messages about the uses of one value, by their index."""

    def __init__(self, program: Program, value: ValueKind, uses: Uses) -> None:
        self._program, self._value, self._uses = program, value, uses

    def row(self, use: int) -> str:
        return name(self._program, int(self._uses.row[use]))

    def value(self, use: int) -> str:
        """Return the value's name, with its stage or part if it is not the instruction's own."""
        for coordinate in ("stage", "part"):
            if coordinate in self._value.scope:
                here = self._uses.coordinate(use, coordinate)
                if here != getattr(self._program.columns, coordinate)[self._uses.row[use]]:
                    return f"{self._value.name!r} of {coordinate} {here}"
        return repr(self._value.name)

    def unmade(self, use: int) -> str:
        makers = range(use, int(self._uses.last[use]) + 1)
        later = next((other for other in makers if self._uses.writes[other]), None)
        if later is None:
            rank = self._uses.coordinate(use, "rank")
            return f"{self.row(use)} reads {self.value(use)}, which nothing makes on rank {rank}"
        return f"{self.row(use)} reads {self.value(use)} before {self.row(later)} makes it"

    def gone(self, before: Ints, use: int) -> str:
        return f"{self.row(use)} reads {self.value(use)} after {self.row(int(before[use]))} has consumed it"

    def again(self, before: Ints, use: int) -> str:
        first = int(before[use])
        state = "before anything has read" if use == first + 1 else "while nothing has ended"
        return f"{self.row(use)} makes {self.value(use)} again {state} that of {self.row(first)}"

    def late(self, last_read: Ints, use: int) -> str:
        return f"{self.row(use)} adds to {self.value(use)} after {self.row(int(last_read[use]))} has read it"

    def unread(self, what: str, use: int) -> str:
        return f"nothing {what} the {self.value(use)} that {self.row(use)} makes"

    def unawaited(self, write: Ints, read: Ints, pair: int) -> str:
        use = int(read[pair])
        maker = self.row(int(write[pair]))
        return f"{self.row(use)} does not wait for {maker}, which makes its {self.value(use)}"

    def overtaken(self, read: Ints, end: Ints, pair: int) -> str:
        use = int(end[pair])
        return f"{self.row(use)} does not wait for {self.row(int(read[pair]))}, which reads {self.value(use)}"


def check_lives(program: Program, order: Order, value: ValueKind, uses: Uses) -> list[Violation]:
    """Check the life of a value that its step makes and ends."""
    words = _Words(program, value, uses)
    index = np.arange(len(uses.row), dtype=np.int64)
    writes, reads, consumes = uses.writes, ~uses.writes, uses.consumes
    latest = _running(index, writes | consumes)
    before = _before(latest, uses.first)
    held = (before >= 0) & writes[before]
    born = writes & ~held if value.accumulates else writes
    birth = _running(index, born)
    last_read = _running(index, reads)
    tellers: list[tuple[Mask, Callable[[int], str]]] = [
        (reads & (before < 0), words.unmade),
        (reads & (before >= 0) & ~held, partial(words.gone, before)),
        *_unused(value, words, index, uses, born, latest, last_read),
    ]
    if value.accumulates:
        tellers.append((writes & held & (last_read >= birth), partial(words.late, last_read)))
    else:
        tellers.append((writes & held, partial(words.again, before)))
    found = [one for wrong, say in tellers for one in violations(_WHERE, np.flatnonzero(wrong), say)]
    found += _check_awaited(order, words, uses, np.flatnonzero(reads & held), birth)
    return found + _check_let_go(order, words, uses, np.flatnonzero(consumes & held), birth)


def _running(index: Ints, chosen: Mask) -> Ints:
    """Return the last chosen index up to each one, or -1."""
    return np.maximum.accumulate(np.where(chosen, index, -1))


def _before(latest: Ints, first: Ints) -> Ints:
    """Return the latest chosen index before each one, among the uses at the same coordinates, or -1."""
    before = np.append(-1, latest[:-1])[: len(latest)]
    return np.where(before >= first, before, -1)


def _unused(
    value: ValueKind, words: _Words, index: Ints, uses: Uses, born: Mask, latest: Ints, last_read: Ints
) -> Iterator[tuple[Mask, Callable[[int], str]]]:
    """Yield masks of values that are made and then not read, or not consumed, with their messages."""
    if value.until == "freed":
        kept = np.zeros(len(index), dtype=np.bool_)
        ends = latest[uses.last]
        kept[ends[(ends >= uses.first) & uses.writes[ends]]] = True
        yield kept, partial(words.unread, "consumes")
    elif value.until == "read":
        births = np.flatnonzero(born)
        until = np.minimum(np.append(births, len(index))[1:] - 1, uses.last[births])
        unread = np.zeros(len(index), dtype=np.bool_)
        unread[births[last_read[until] < births]] = True
        yield unread, partial(words.unread, "reads")


def _check_awaited(order: Order, words: _Words, uses: Uses, read: Ints, birth: Ints) -> list[Violation]:
    """Check that each of these reads waits for all writes of its value."""
    makers, made = _numbered(uses.writes)
    end, waits = made[read], uses.waits[read]
    begin = np.where(waits == LAST, end, made[birth[read]]) - 1
    which, number = _spread(begin, end)
    write, read, waits = makers[number], read[which], waits[which]
    source, target = uses.row[write], uses.row[read]
    waited = np.zeros(len(read), dtype=np.bool_)
    for mode, check in ((EACH, order.joined), (FIRST, order.reaches), (LAST, order.spoken_for)):
        mine = np.flatnonzero(waits == mode)
        if len(mine):
            waited[mine] = check(source[mine], target[mine])
    return violations(_WHERE, np.flatnonzero(~waited), partial(words.unawaited, write, read))


def _check_let_go(order: Order, words: _Words, uses: Uses, end: Ints, birth: Ints) -> list[Violation]:
    """Check that each of these consuming reads waits for the other reads of its value."""
    readers, had = _numbered(~uses.writes)
    which, number = _spread(had[birth[end]], had[end] - 1)
    read, end = readers[number], end[which]
    return _overtaken(words, uses, read, end, order.ahead(uses.row[read], uses.row[end]))


def _overtaken(words: _Words, uses: Uses, read: Ints, end: Ints, waited: Mask) -> list[Violation]:
    """Return the violations of uses that may end a value, or make it anew, before its reads."""
    wrong = ~waited & (uses.row[read] != uses.row[end])
    return violations(_WHERE, np.flatnonzero(wrong), partial(words.overtaken, read, end))


def _numbered(chosen: Mask) -> tuple[Ints, Ints]:
    """Return the chosen indices, and their number up to each index."""
    return np.flatnonzero(chosen), np.cumsum(chosen, dtype=np.int64)


def _spread(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return all numbers of the ranges [begin, end), and the index of the range of each."""
    which, step = numbered(np.maximum(end - begin, 0))
    return which, begin[which] + step


def check_carried(program: Program, order: Order, value: ValueKind, uses: Uses) -> list[Violation]:
    """Check a value that lasts until its next write, in this step, a later one or the next cycle."""
    words = _Words(program, value, uses)
    index = np.arange(len(uses.row), dtype=np.int64)
    writes = uses.writes
    if not writes.any():
        return []
    latest = _running(index, writes)
    before, final = _before(latest, uses.first), latest[uses.last]
    # Instructions of the prologue run once, before all cycles, and read the initial content.
    reads = ~writes & (final >= uses.first) & (program.columns.iteration[uses.row] >= 0)
    writers = np.append(np.flatnonzero(writes), len(index))
    after = writers[np.searchsorted(writers, index)]
    opening = writers[np.searchsorted(writers, uses.first)]
    now, earlier = np.flatnonzero(reads & (before >= 0)), np.flatnonzero(reads & (before < 0))
    soon = np.flatnonzero(reads & (after <= uses.last))
    later = np.flatnonzero(reads & (after > uses.last))
    row = uses.row
    unread = writes.copy()
    unread[before[now]] = False
    unread[final[earlier]] = False
    found = violations(_WHERE, np.flatnonzero(unread), partial(words.unread, "reads"))
    for write, read, check in (
        (before[now], now, order.ahead),
        (final[earlier], earlier, order.ahead_of_next_cycle),
    ):
        waited = check(row[write], row[read])
        found += violations(_WHERE, np.flatnonzero(~waited), partial(words.unawaited, write, read))
    for read, end, check in (
        (soon, after[soon], order.ahead),
        (later, opening[later], order.ahead_of_next_cycle),
    ):
        found += _overtaken(words, uses, read, end, check(row[read], row[end]))
    return found
