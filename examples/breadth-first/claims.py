"""How the examples here print a claim of the paper beside what weft predicts."""

from __future__ import annotations


def say(claim: str, *, paper: str, predicted: str, holds: bool, why_not: str = "") -> None:
    """Print a claim; `why_not` explains it where it does not hold."""
    print(f"  {'holds' if holds else 'DOES NOT HOLD':<15}{claim}")
    print(f"  {'':<15}paper: {paper}; predicted: {predicted}")
    if why_not and not holds:
        print(f"  {'':<15}because {why_not}")
