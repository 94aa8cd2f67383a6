"""What stacks answered, as a table: how many plans each takes, and why it refuses the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# A loss that the user makes good before the stack takes the file.
_FIRST = "nearest: register "


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a stack said of each plan.

    Attributes:
        version: the stack's. `skipped`: why it was not asked.
        accepted: plans that it takes. `refused`: what it says of the others.
        losses: of every plan, what the emitter itself says to be lost.
        not_written: plans that the emitter refuses, with its line.
    """

    stack: str
    version: str = ""
    skipped: str = ""
    accepted: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    not_written: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused_unsaid(self) -> tuple[str, ...]:
        """Refused plans of which no loss says what the user has to do first: faults of the emitter."""
        return tuple(
            name for name in self.refused if not any(_FIRST in loss for loss in self.losses.get(name, ()))
        )


def answers_of(
    stack: str,
    out: str,
    errors: str,
    *,
    losses: Mapping[str, Sequence[str]],
    not_written: Mapping[str, str],
) -> Asked:
    """Read the lines that `answering.py` prints; a program that ended early counts as skipped."""
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    version = next((line["version"] for line in lines if "version" in line), "")
    said = {line["name"]: line["said"] for line in lines if "name" in line}
    if len(said) < len(losses):
        last = errors.strip().splitlines()[-1:] or ["without a word"]
        return Asked(stack=stack, version=version, skipped=f"it ended early: {last[0]}")
    return Asked(
        stack=stack,
        version=version,
        accepted=tuple(name for name, text in said.items() if not text),
        refused={name: text for name, text in said.items() if text},
        losses=losses,
        not_written=not_written,
    )


def rows(asked: Asked) -> list[str]:
    """One line for the stack, and one for each reason."""
    if asked.skipped:
        return [f"{asked.stack:<16} skipped: {asked.skipped}"]
    plans = len(asked.accepted) + len(asked.refused)
    found = [
        f"{asked.stack:<16} {asked.version:<28} plans {plans:>3}   accepted {len(asked.accepted):>3}   "
        f"refused {len(asked.refused):>3}   not written {len(asked.not_written):>3}"
    ]
    for names, reason in _by_reason(asked.refused).items():
        said = "" if set(names) & set(asked.refused_unsaid) else " (said to be lost)"
        found.append(f"  refused{said}: {', '.join(names)}: {reason}")
    for names, reason in _by_reason(asked.not_written).items():
        found.append(f"  not written: {', '.join(names)}: {reason}")
    return found


def _by_reason(reasons: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Names with the same reason together, in their order."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return {tuple(found): reason for reason, found in names.items()}
