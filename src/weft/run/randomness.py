"""Counter-based randomness: numbers depend on what they are drawn for, never on what was drawn before."""

from __future__ import annotations

import hashlib
import json


def counter_seed(seed: int, *coordinates: int | str) -> int:
    """Return a 63-bit seed for a generator, the same in every process and version.

    `coordinates` say what is drawn: a parameter's name, or (step, micro-batch, stage).
    """
    key = json.dumps([seed, *coordinates]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
