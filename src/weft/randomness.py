"""Counter-based randomness: a number depends on its purpose only, never on earlier draws."""

from __future__ import annotations

import hashlib
import json


def counter_seed(seed: int, *coordinates: int | str) -> int:
    """Return a 63-bit seed for a generator, the same in every process and version.

    `coordinates` name the purpose of the draw: a parameter's name, or (step, micro-batch, stage).
    """
    key = json.dumps([seed, *coordinates]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
