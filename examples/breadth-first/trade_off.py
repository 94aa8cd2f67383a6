"""Training time against cost with the critical batch, predicted.

Lamy-Poirier (arXiv 2211.05953): what the utilisation at each batch per GPU means for training a GPT of 52
billion parameters on clusters of up to 65,536 V100. Pipeline and tensor degree and micro-batches stay,
replicas are added; the cheapest batch per GPU is taken for each size.

    python examples/breadth-first/trade_off.py [PICTURE.svg]
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from claims import say

from weft.cli.curve import trade_off_table
from weft.cli.output import console
from weft.describe.layout import PartialLayout
from weft.planning.curve import (
    BREADTH_FIRST,
    NO_PIPELINE,
    RIVALS,
    curve,
    default_cluster_sizes,
    default_critical_batch,
)
from weft.planning.problem import problem_of
from weft.web.charts.curve import curve_svg, share_text

LARGE = 4096


def main() -> None:
    pins = PartialLayout(recompute="full")
    problem = problem_of(model="gpt-52b", on="64xv100-32gb", precision="fp16", pins=pins)
    critical_batch = default_critical_batch(problem.job)
    answer = curve(problem)
    devices = default_cluster_sizes(problem.job)
    print(
        "gpt-52b on V100, fp16, every layer recomputed, "
        f"critical batch assumed to be {critical_batch:.0f} samples\n"
        "cost over that of the least samples at full utilisation, and the samples per GPU it is reached with"
    )
    console().print(trade_off_table(answer, devices[::3], critical_batch))
    print()
    ours = answer.trade_offs(BREADTH_FIRST.name, devices, critical_batch)
    say(
        "the best samples per GPU shrink as the cluster grows",
        paper="they do",
        predicted=", ".join(f"{share_text(each.samples_per_device)} on {each.devices}" for each in ours[::3]),
        holds=all(one.samples_per_device >= two.samples_per_device for one, two in pairwise(ours)),
    )
    (large,) = answer.trade_offs(BREADTH_FIRST.name, (LARGE,), critical_batch)
    for method in (*RIVALS.values(), NO_PIPELINE):
        (other,) = answer.trade_offs(method.name, (LARGE,), critical_batch)
        say(
            f"on {LARGE} GPUs breadth-first trains sooner and cheaper than {method.name}",
            paper="it does",
            predicted=f"{1 - large.cost / other.cost:.1%} less time and cost",
            holds=large.cost < other.cost,
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(curve_svg(answer, devices, critical_batch), encoding="utf-8")


if __name__ == "__main__":
    main()
