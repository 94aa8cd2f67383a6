"""Codecs beside a copy: bytes of fp32 values per second that one CPU core, or a GPU, encodes and decodes.

Rounds of a copy of the same values and of the codec alternate. The share is the rate of the codec over that
of the copy. Times are CPU seconds of one thread. On a machine with CUDA all of it runs there, on the clock.

    python benchmarks/sync_codecs.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from figures import Value
from harness import Report, parser

from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser
from weft.sync.codecs.reference import ReferencePath

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
    report = Report("sync_codecs", options().parse_args())
    report.print_machine()
    if CUDA:
        report.say(f"device: {torch.cuda.get_device_name()}")
    torch.set_num_threads(1)
    for cell, call, target in cells():
        if report.missing(cell):
            report.add_cell(cell, beside_copy(call, ON_GPU if CUDA else target))


def cells() -> Iterator[tuple[str, Callable[[], None], float | None]]:
    """The name of each cell, the call that it times, and its target on a CPU."""
    values, weights = torch.randn(ELEMENTS, device=DEVICE), torch.zeros(ELEMENTS, device=DEVICE).bfloat16()
    targets: Mapping[int, tuple[float | None, float | None]] = {4: (ENCODE, DECODE), 8: (None, None)}
    for bits, (encode, decode) in targets.items():
        form = Quantiser(bits=bits, group=GRADIENT_GROUP, smooth=True)
        payload, total = payload_of(form), torch.empty_like(values)
        yield f"{bits} bits, Hadamard, encode", partial(form.encode, values, payload, KEY), encode
        yield f"{bits} bits, decode", partial(form.decode, payload, total), decode
    unfused, plain = ReferencePath(), Quantiser(bits=4, group=GRADIENT_GROUP, smooth=True)
    packed = payload_of(plain)
    yield "4 bits, Hadamard, encode, unfused", partial(unfused.encode, plain, values, packed, KEY, 0), None
    yield "4 bits, decode, unfused", partial(unfused.decode_sum, plain, packed[None], total), None
    payloads = torch.stack([payload] * REPLICAS)
    yield f"{bits} bits, sum of {REPLICAS}", partial(form.decode_sum, payloads, total), None
    again, change = (Quantiser(bits=4, group=group) for group in (GRADIENT_GROUP, WEIGHT_GROUP))
    sums = partial(again.encode_sum, payloads, form, ELEMENTS, payload_of(again), KEY)
    yield f"{bits} bits, sum of {REPLICAS}, encode in 4 bits", sums, None
    yield (
        "4 bits, difference to bf16, encode",
        partial(change.encode_difference, values, weights, payload_of(change), KEY),
        None,
    )


def payload_of(form: Quantiser) -> torch.Tensor:
    """A payload of as many elements: zeros."""
    return torch.zeros(form.payload_bytes(ELEMENTS), dtype=torch.uint8, device=DEVICE)


def beside_copy(call: Callable[[], None], target: float | None) -> dict[str, Value]:
    """Bytes of values per second, and the share of the rate of a copy."""
    source, copied = torch.randn(ELEMENTS, device=DEVICE), torch.empty(ELEMENTS, device=DEVICE)
    pairs = [(seconds(partial(copied.copy_, source)), seconds(call)) for _ in range(ROUNDS + 1)]
    copy_s, call_s = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    share = copy_s / call_s
    met = None if target is None else share >= target
    return {
        "values a second": Value(4 * ELEMENTS / call_s, "bytes"),
        "of a copy": Value(share, "share", target, met),
    }


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
