"""The alternation that 1F1B and its descendants share: one forward, one backward in turn."""

from __future__ import annotations

import numpy as np

from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.program import Ints


def take_turns(steps: int, warm_up: int) -> tuple[Ints, Ints]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.

    Returns:
        Kind code and number of the step within its kind, both of shape (2 * steps,).
    """
    step = np.arange(steps, dtype=np.int64)
    return _by_turn(steps, {FORWARD: np.maximum(2 * (step - warm_up), -1), BACKWARD: 2 * step + 1})


def take_split_turns(steps: int, warm_up: int, weight_lag: int) -> tuple[Ints, Ints]:
    """As `take_turns` with backwards in two parts; weight part i follows input part i + `weight_lag`.

    Returns:
        Kind code and number of the step within its kind, both of shape (3 * steps,).
    """
    step = np.arange(steps, dtype=np.int64)
    return _by_turn(
        steps,
        {
            FORWARD: np.maximum(3 * (step - warm_up), -1),
            BACKWARD_INPUT: 3 * step + 1,
            BACKWARD_WEIGHT: 3 * (step + weight_lag) + 2,
        },
    )


def _by_turn(steps: int, turns: dict[int, Ints]) -> tuple[Ints, Ints]:
    sequence = np.argsort(np.concatenate(list(turns.values())), kind="stable")
    kind = np.repeat(np.array(list(turns), dtype=np.int64), steps)
    return kind[sequence], np.tile(np.arange(steps, dtype=np.int64), len(turns))[sequence]
