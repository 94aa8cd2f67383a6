"""Head and loss, forward and backward: seconds and tracked peak of all logits at once and of chunks of them.

Seconds are those of one thread. Rounds of all kernels alternate, and the least of each counts, as others
use the machine, too. The peak is the one that torch tracks over fake tensors, beside vectors, weight and its
gradient. The front are the kernels that none beats in both. The automatic choice is the kernel with the
least predicted time. Its distance is its time over the least time of any kernel with no higher peak.

    python benchmarks/loss_head.py            # all cells, some minutes
    python benchmarks/loss_head.py --quick    # the smallest
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
from figures import Value
from harness import Report, parser
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from weft.describe.amount import Shape
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_choices import Value as Chunks
from weft.describe.layer_choices import with_choices
from weft.describe.loss_choice import BY_SIZE, CHUNKED
from weft.describe.model import ModelConfig
from weft.describe.plan import LayerChoice
from weft.methods.loss_kernels.runtime.chunked import ChunkedLogits
from weft.predict.cost.compute import ComputeModel
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.training.tasks.base import cross_entropy

TARGET = 0.02
ROUNDS = 11
WHOLE = "whole"
HIDDEN, VOCABULARIES, TOKENS = (128, 768), (4096, 16384), (512, 2048)
CHUNKS = (64, 384, 1024)
Sizes = tuple[int, int, int]


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="the smallest cell alone")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("loss_head", asked)
    report.print_machine()
    torch.set_num_threads(1)
    cells = list(product(HIDDEN, VOCABULARIES, TOKENS))
    worst = max(distance(report, sizes) for sizes in (cells[:1] if asked.quick else cells))
    report.add("largest distance of the automatic choice", Value(worst, "share", TARGET))


def distance(report: Report, sizes: Sizes) -> float:
    """Measure a cell, and return the distance of the automatic choice from its front."""
    hidden, vocabulary, tokens = sizes
    words = f"hidden {hidden}, vocabulary {vocabulary}, {tokens} tokens"
    kernels: list[Chunks] = [WHOLE, BY_SIZE, *(chunk for chunk in CHUNKS if chunk < tokens)]
    missing = [kernel for kernel in kernels if report.missing(f"{words}: {kernel}")]
    if missing:
        for kernel, seconds in least_seconds(sizes, kernels).items():
            found = {
                "time": Value(seconds, "s"),
                "predicted": Value(predicted_s(sizes, kernel), "s"),
                "peak": Value(tracked_peak(sizes, kernel), "bytes"),
            }
            report.add_cell(f"{words}: {kernel}", found)
    known = {kernel: report.values(f"{words}: {kernel}") for kernel in kernels}
    chosen = min((WHOLE, BY_SIZE), key=lambda kernel: known[kernel]["predicted"])
    smaller = [one["time"] for one in known.values() if one["peak"] <= known[chosen]["peak"]]
    found_distance = known[chosen]["time"] / min(smaller) - 1.0
    report.say(f"{words}: front {', '.join(map(str, front(known)))}; automatic {chosen}")
    report.add(f"{words}: distance", Value(found_distance, "share", TARGET))
    return found_distance


def front(known: Mapping[Chunks, Mapping[str, float]]) -> list[Chunks]:
    """The kernels that no other beats in both time and peak, fastest first."""
    by_time = sorted(known, key=lambda kernel: known[kernel]["time"])
    return [
        kernel
        for place, kernel in enumerate(by_time)
        if all(known[kernel]["peak"] < known[other]["peak"] for other in by_time[:place])
    ]


class Head:
    """A head of random weights and its input; `both_ways` runs it with a kernel."""

    def __init__(self, sizes: Sizes) -> None:
        width, self.vocabulary, tokens = sizes
        self.stream = torch.randn(tokens, width).requires_grad_()
        self.targets = torch.randint(self.vocabulary, (tokens,))
        self.weight = nn.Parameter(torch.randn(self.vocabulary, width) / width**0.5)
        self.weight.grad = torch.zeros_like(self.weight)

    def both_ways(self, kernel: Chunks) -> None:
        if kernel == WHOLE:
            loss = cross_entropy(nn.functional.linear(self.stream, self.weight), self.targets)
        else:
            unmade = ChunkedLogits(
                self.stream, self.weight, None, self.vocabulary, TensorRanks(), chunks=kernel
            )
            loss = unmade.cross_entropy(self.targets)
        loss.backward()
        self.stream.grad = None


def least_seconds(sizes: Sizes, kernels: list[Chunks]) -> dict[Chunks, float]:
    """The least seconds of each kernel over rounds that alternate.

    The same kernel took 2.5 % longer right after all logits. So every second round goes backwards.
    """
    head = Head(sizes)
    taken: dict[Chunks, list[float]] = {kernel: [] for kernel in kernels}
    for turn in range(ROUNDS):
        for kernel in kernels if turn % 2 else reversed(kernels):
            taken[kernel].append(seconds(partial(head.both_ways, kernel)))
    return {kernel: min(each) for kernel, each in taken.items()}


def seconds(call: Callable[[], None]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def tracked_peak(sizes: Sizes, kernel: Chunks) -> int:
    """The bytes that a kernel adds at its peak to those that stay."""
    with FakeTensorMode():
        head, tracker = Head(sizes), MemTracker()
        assert head.weight.grad is not None, "it begins with one"
        tracker.track_external(head.stream, head.targets, head.weight, head.weight.grad)
        with tracker:
            before = _total(tracker, "current")
            head.both_ways(kernel)
        return _total(tracker, "peak") - before


def _total(tracker: MemTracker, when: str) -> int:
    return sum(parts["Total"] for parts in tracker.get_tracker_snapshot(when).values())


def predicted_s(sizes: Sizes, kernel: Chunks) -> float:
    """The predicted seconds of the head on a core of this machine, by its data sheet."""
    width, vocabulary, tokens = sizes
    config = ModelConfig(
        name="head",
        family="gpt",
        layers=1,
        hidden=width,
        heads=1,
        key_value_heads=1,
        feed_forward=width,
        vocabulary=vocabulary,
        sequence=tokens,
    )
    graph, last = layer_graph(config), 2
    if kernel != WHOLE:
        graph = with_choices(graph, [LayerChoice(name=CHUNKED, layers=(last,), value=kernel)])
    device = parse_cluster("this-machine").groups[0].device
    times = ComputeModel().stage_times(graph, [last], Shape(1, tokens), "fp32", device)
    return times.forward_s + times.backward_input_s + times.backward_weight_s


if __name__ == "__main__":
    main()
