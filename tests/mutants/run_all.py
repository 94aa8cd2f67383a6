"""Try all stated mutations, or those of the rooms named, and list those that no test notices.

    PYTHONPATH=tests python tests/mutants/run_all.py [ROOM ...]

Exit code: 0 when tests catch all of them, else 1.
"""

from __future__ import annotations

import sys
import time

from mutants.mutations import ROOT, Mutation, StaleError, mutations, rooms
from mutants.trials import Trials, Verdict, trials

from weft.signals import terminable


def main(chosen: list[str]) -> int:
    asked = mutations(chosen or rooms())
    with terminable(), trials(ROOT) as made:
        sound = _sound(made, asked)
        left = [one for one in asked if not _caught(made, one, sound=one.tests in sound)]
    print(f"{len(asked) - len(left)} of {len(asked)} mutations are caught")
    for one in left:
        print(f"not caught: {one.room}: {one.breaks} ({one.file}; {', '.join(one.tests)})", file=sys.stderr)
    return 1 if left else 0


def _sound(made: Trials, asked: list[Mutation]) -> set[tuple[str, ...]]:
    """The tests that pass without any mutation: all at once, or else those that do by themselves."""
    each = {one.tests for one in asked}
    together = dict.fromkeys(name for tests in each for name in tests)
    return each if made.passes([*together]) else {tests for tests in each if made.passes(tests)}


def _caught(made: Trials, mutation: Mutation, *, sound: bool) -> bool:
    begin = time.monotonic()
    try:
        verdict = str(made.verdict(mutation)) if sound else "BROKEN: its tests fail without it"
    except StaleError:
        verdict = "STALE: the source no longer has its piece"
    taken_s = time.monotonic() - begin
    print(f"{taken_s:6.1f} s  {mutation.room:12} {mutation.breaks}: {verdict}", flush=True)
    return verdict == Verdict.CAUGHT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
