"""Questions about single sources: the kind of a closing bracket, and the digits of a sum.

The model is the run's export, loaded by `transformers`. Both figures are shares of right next bytes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import torch

CLOSING = ")]}"
WINDOW, WINDOWS = 64, 400


def probes(run: Path, python: Path) -> dict[str, float]:
    """Return `brackets` and `sums`: the shares of right answers of a run's model.

    Args:
        python: a folder of Python text; its last files answer, of which training has read most.
    """
    from transformers import AutoModelForCausalLM

    folder = run / "export"
    if not folder.exists():
        words = [sys.executable, "-m", "weft", "export", str(run), str(folder)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return {"brackets": _brackets(model, python), "sums": _sums(model)}


def _brackets(model: torch.nn.Module, python: Path) -> float:
    """Return how often the likeliest of the closing brackets is the one that the text has there."""
    text = "".join(path.read_text() for path in sorted(python.iterdir())[-8:]).encode()
    draw = random.Random(1)
    starts = [draw.randrange(len(text) - WINDOW) for _ in range(WINDOWS)]
    tokens = torch.tensor([list(text[start : start + WINDOW]) for start in starts])
    kinds = torch.tensor([ord(one) for one in CLOSING])
    best = kinds[model(tokens[:, :-1]).logits[..., kinds].argmax(-1)]
    wanted = tokens[:, 1:]
    # Behind half a window, the opening bracket is mostly in sight.
    asked = torch.isin(wanted, kinds) & (torch.arange(WINDOW - 1) >= WINDOW // 2)
    return (best == wanted)[asked].double().mean().item()


def _sums(model: torch.nn.Module) -> float:
    """Return how often a digit of a sum is right, after the digits before it."""
    draw, right, digits = random.Random(2), 0, 0
    for _ in range(WINDOWS):
        first, second = draw.randrange(1000), draw.randrange(1000)
        asked, answer = f"{draw.randrange(1000)}\n{first} + {second} = ", f"{first + second}\n"
        tokens = torch.tensor([list((asked + answer).encode())])
        best = model(tokens[:, :-1]).logits[0].argmax(-1)
        right += int((best == tokens[0, 1:])[-len(answer) :].sum())
        digits += len(answer)
    return right / digits
