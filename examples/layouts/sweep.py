"""Which published rules about layouts emerge from predictions: LLaMA 13B, 30B and 65B on 32 to 256 A100.

python examples/layouts/sweep.py [llama-13b ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from layouts import Case, choices, sweep
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
_WORDS = {True: "emerges", False: "DOES NOT EMERGE", None: "says nothing"}


def say(case: Case, accumulation: Accumulation) -> list[Finding]:
    """Sweep one case and print what becomes of every rule."""
    found = sweep(case, choices(), accumulation)
    print(f"{case}: {sum(one.fits for one in found)} of {len(found)} layouts fit", flush=True)
    findings = [rule(case, found) for rule in RULES]
    for finding in findings:
        print(f"  {_WORDS[finding.emerges]:<17}{finding.rule}\n{'':<19}{finding.figures}")
    return findings


def main(arguments: Sequence[str]) -> None:
    """All cases of the models named, or of all; then how often each rule emerges."""
    accumulation: Accumulation = "separate" if "--separate" in arguments else "fused"
    models = [one for one in arguments if one != "--separate"]
    findings = [say(case, accumulation) for case in CASES if not models or case.model in models]
    for of_rule in zip(*findings, strict=True):
        counts = {verdict: sum(one.emerges is verdict for one in of_rule) for verdict in _WORDS}
        words = ", ".join(f"{_WORDS[verdict]} in {count}" for verdict, count in counts.items() if count)
        print(f"{of_rule[0].rule}: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
