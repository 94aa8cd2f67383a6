"""Which published rules about layouts emerge from predictions: LLaMA 13B, 30B and 65B on 32 to 256 A100.

python examples/layouts/sweep.py [--published] [--separate] [llama-13b ...]

`--published` sweeps the degrees and sizes of the paper's own sheets, `--separate` lets kernels of their own
add up gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from layouts import Case, Choice, choices, sweep
from rules import RULES, Finding

from weft.describe.kernels import Accumulation

CASES = (
    Case("llama-13b", 2048, 32),
    Case("llama-13b", 2048, 64),
    Case("llama-13b", 8192, 64),
    Case("llama-13b", 8192, 128),
    Case("llama-30b", 2048, 64),
    Case("llama-30b", 2048, 256),
    Case("llama-30b", 8192, 64),
    Case("llama-30b", 8192, 128),
    Case("llama-65b", 2048, 64),
    Case("llama-65b", 2048, 128),
)
# The sheets of the paper's main sweep, in which the tokens of tensor ranks were never divided:
# tensor ranks, stages and micro-batch sizes of each.
PUBLISHED = {
    Case("llama-13b", 2048, 64): ((1, 2), (1, 2), (1, 2, 4, 8)),
    Case("llama-13b", 8192, 128): ((1, 2, 4), (1, 2, 4), (1, 2, 4)),
    Case("llama-30b", 2048, 256): ((1, 2, 4), (1, 2, 4), (1, 2, 4)),
    Case("llama-30b", 8192, 128): ((2, 4), (2, 4, 8, 16), (1, 2, 4)),
    Case("llama-65b", 2048, 128): ((2, 4, 8), (2, 4, 8), (1, 2, 4)),
}
_WORDS = {True: "emerges", False: "DOES NOT EMERGE", None: "says nothing"}


def of_sheet(case: Case) -> Iterable[Choice]:
    """What the paper swept of a case of `PUBLISHED`."""
    degrees, stages, sizes = PUBLISHED[case]
    return choices(degrees=degrees, stages=stages, sizes=sizes, tokens_divided=(False,))


def say(case: Case, chosen: Iterable[Choice], accumulation: Accumulation) -> list[Finding]:
    """Sweep one case and print what becomes of every rule."""
    found = sweep(case, chosen, accumulation)
    print(f"{case}: {sum(one.fits for one in found)} of {len(found)} layouts fit", flush=True)
    findings = [rule(case, found) for rule in RULES]
    for finding in findings:
        print(f"  {_WORDS[finding.emerges]:<17}{finding.rule}\n{'':<19}{finding.figures}")
    return findings


def main(arguments: Sequence[str]) -> None:
    """All cases of the models named, or of all; then how often each rule emerges."""
    accumulation: Accumulation = "separate" if "--separate" in arguments else "fused"
    published = "--published" in arguments
    models = [one for one in arguments if not one.startswith("--")]
    findings = [
        say(case, of_sheet(case) if published else choices(), accumulation)
        for case in (PUBLISHED if published else CASES)
        if not models or case.model in models
    ]
    for of_rule in zip(*findings, strict=True):
        counts = {verdict: sum(one.emerges is verdict for one in of_rule) for verdict in _WORDS}
        words = ", ".join(f"{_WORDS[verdict]} in {count}" for verdict, count in counts.items() if count)
        print(f"{of_rule[0].rule}: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
