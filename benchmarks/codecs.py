"""Codecs beside a copy: bytes of fp32 values per second that one CPU core, or a GPU, encodes and decodes.

Rounds of a copy of the same values and of the codec alternate. The share is the rate of the codec over that
of the copy. Times are CPU seconds of one thread. On a machine with CUDA all of it runs there, on the clock.

    python benchmarks/codecs.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from figures import Value
from harness import Report, parser

from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ELEMENTS = 1 << (28 if CUDA else 24)
CLOCK = time.perf_counter if CUDA else time.thread_time
ROUNDS, CALLS = 15, 8 if CUDA else 1
GRADIENT_GROUP, WEIGHT_GROUP, REPLICAS = 128, 2048, 4
KEY = Key.of(0, "benchmark")
# Shares of a copy's rate, on a CPU core; a GPU keeps to one.
ENCODE, DECODE, ON_GPU = 0.15, 0.5, 0.8


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("codecs", options().parse_args())
    report.print_machine()
    if CUDA:
        report.say(f"device: {torch.cuda.get_device_name()}")
    torch.set_num_threads(1)
    for cell, call, target in cells():
        if report.missing(cell):
            report.add_cell(cell, beside_copy(call, ON_GPU if CUDA else target))


def cells() -> Iterator[tuple[str, Callable[[], None], float | None]]:
    """The name of each cell, what it times, and its target on a CPU."""
    values = torch.randn(ELEMENTS, device=DEVICE)
    weights, total = torch.zeros_like(values, dtype=torch.bfloat16), torch.empty_like(values)
    four, eight = (Quantiser(bits=bits, group=GRADIENT_GROUP, smooth=True) for bits in (4, 8))
    for form in (four, eight):
        payload = payload_of(form)
        yield (
            f"{form.bits} bits, Hadamard, encode",
            lambda f=form, p=payload: f.encode(values, p, KEY),
            (ENCODE if form is four else None),
        )
        yield (
            f"{form.bits} bits, decode",
            lambda f=form, p=payload: f.decode(p, total),
            (DECODE if form is four else None),
        )
    payloads = torch.stack([payload] * REPLICAS)
    yield f"8 bits, sum of {REPLICAS}", lambda: eight.decode_sum(payloads, total), None
    again, sums = Quantiser(bits=4, group=GRADIENT_GROUP), payload_of(four)
    yield (
        f"8 bits, sum of {REPLICAS}, encode in 4 bits",
        lambda: again.encode_sum(payloads, eight, ELEMENTS, sums, KEY),
        None,
    )
    changes = Quantiser(bits=4, group=WEIGHT_GROUP)
    change = payload_of(changes)
    yield (
        "4 bits, difference to bf16",
        lambda: changes.encode_difference(values, weights, change, KEY),
        None,
    )


def payload_of(form: Quantiser) -> torch.Tensor:
    """A payload of all values, encoded zeros."""
    payload = torch.zeros(form.payload_bytes(ELEMENTS), dtype=torch.uint8, device=DEVICE)
    form.encode(torch.zeros(ELEMENTS, device=DEVICE), payload, KEY)
    return payload


def beside_copy(call: Callable[[], None], target: float | None) -> dict[str, Value]:
    """Bytes of values per second, and the share of the rate of a copy."""
    source, copied = torch.randn(ELEMENTS, device=DEVICE), torch.empty(ELEMENTS, device=DEVICE)
    pairs = []
    for _ in range(ROUNDS + 1):
        pairs.append((seconds(lambda: copied.copy_(source)), seconds(call)))
    copies, calls = zip(*pairs[1:], strict=True)
    share = statistics.median(copies) / statistics.median(calls)
    rate = 4 * ELEMENTS / statistics.median(calls)
    met = None if target is None else share >= target
    return {"values": Value(rate, "per s"), "of a copy": Value(share, "share", target, met)}


def seconds(call: Callable[[], object]) -> float:
    """Mean seconds of a few calls."""
    finish()
    start = CLOCK()
    for _ in range(CALLS):
        call()
    finish()
    return (CLOCK() - start) / CALLS


def finish() -> None:
    if CUDA:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
