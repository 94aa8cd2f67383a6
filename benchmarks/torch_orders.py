"""Compute orders as the compute-only CSV files of `torch.distributed.pipelining`.

A row is one rank, a cell one action: stage, letter, micro-batch, as `2F0`. F is a forward, B a backward, I
and W its input and weight parts. An empty cell is an idle slot, which weft leaves to the simulator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from weft.errors import InputError, Violation
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules.base import ComputeOrder

LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
KIND_OF_LETTER = {letter: kind for kind, letter in LETTERS.items()}

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})", re.ASCII)


def orders_to_csv(orders: Sequence[ComputeOrder]) -> str:
    """Return the orders of all devices, device by device, in the format that torch's schedules load.

    Raises:
        InputError: when an instruction is no computation of a micro-batch, or a stage is on several devices.
    """
    lines = []
    home: dict[int, int] = {}
    for device, order in enumerate(orders):
        twice = [stage for stage in order.stage.tolist() if home.setdefault(stage, device) != device]
        if twice:
            problem = f"stage {twice[0]} is on device {home[twice[0]]}, too; torch has each on one device"
            raise InputError(Violation(f"order of device {device}", problem))
        strange = sorted(set(order.kind.tolist()) - set(LETTERS))
        if strange:
            problem = f"kinds {strange} have no action in torch"
            raise InputError(Violation(f"order of device {device}", problem))
        rows = zip(order.kind.tolist(), order.stage.tolist(), order.micro_batch.tolist(), strict=True)
        lines.append(",".join(f"{stage}{LETTERS[kind]}{micro_batch}" for kind, stage, micro_batch in rows))
    return "".join(f"{line}\n" for line in lines)


def orders_from_csv(text: str, where: str) -> list[ComputeOrder]:
    """Read the orders of all devices; `where` names the file in errors.

    Raises:
        InputError: with every cell that is no computation. If there is none: with every stage on two ranks,
            and every computation that is missing, repeated or before its inputs.
    """
    rows = [line.split(",") for line in text.splitlines()]
    if not rows:
        raise InputError(Violation(where, "is empty; one row of actions per rank is needed"))
    problems: list[Violation] = []
    orders = []
    for rank, row in enumerate(rows):
        actions: list[tuple[int, int, int]] = []
        for place, cell in enumerate(word.strip() for word in row):
            match = _ACTION.fullmatch(cell)
            if match is not None:
                actions.append((KIND_OF_LETTER[match[2]], int(match[1]), int(match[3])))
            elif cell:
                wrong = f"{cell!r} is no computation; actions are a stage, one of F B I W, and a micro-batch"
                problems.append(Violation(f"{where}, line {rank + 1}, cell {place + 1}", wrong, "0F0"))
        table = np.array(actions, dtype=np.int64).reshape(-1, 3)
        orders.append(ComputeOrder(table[:, 0], table[:, 1], table[:, 2]))
    problems = problems or _order_problems(orders, where)
    if problems:
        raise InputError(problems)
    return orders


def _order_problems(orders: Sequence[ComputeOrder], where: str) -> list[Violation]:
    """Return the violations that prevent complete rows from being one step of a pipeline."""
    home: dict[int, int] = {}
    done: Counter[tuple[int, int, int]] = Counter()
    problems = []
    for rank, order in enumerate(orders):
        place = f"{where}, line {rank + 1}"
        if not len(order.kind):
            problems.append(Violation(place, "has no action; every rank computes"))
        for kind, stage, micro_batch in zip(*(column.tolist() for column in order), strict=True):
            action = f"{stage}{LETTERS[kind]}{micro_batch}"
            if home.setdefault(stage, rank) != rank:
                problem = f"{action}: stage {stage} is on line {home[stage] + 1}, too"
                problems.append(Violation(place, problem))
            done[kind, stage, micro_batch] += 1
            if done[kind, stage, micro_batch] > 1:
                problems.append(Violation(place, f"{action} is there more than once"))
            needs = BACKWARD_INPUT if kind == BACKWARD_WEIGHT else FORWARD
            if kind != FORWARD and not done[needs, stage, micro_batch]:
                problem = f"{action} comes before {stage}{LETTERS[needs]}{micro_batch}"
                problems.append(Violation(place, problem))
    return problems or _missing(done, where)


def _missing(done: Counter[tuple[int, int, int]], where: str) -> list[Violation]:
    """Check that stages and micro-batches count from 0, and that each pair runs forward and backward."""
    problems = []
    for name, numbers in (
        ("stage", {stage for _, stage, _ in done}),
        ("micro-batch", {micro_batch for _, _, micro_batch in done}),
    ):
        # The smallest number that is missing says enough, however large the others are.
        gap = next(number for number in range(len(numbers) + 1) if number not in numbers)
        if gap != len(numbers):
            problems.append(Violation(where, f"has {name} {max(numbers)} but no {name} {gap}"))
    if problems:
        return problems
    stages = 1 + max(stage for _, stage, _ in done)
    micro_batches = 1 + max(micro_batch for _, _, micro_batch in done)
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            here = {kind for kind in LETTERS if done[kind, stage, micro_batch]}
            if here not in ({FORWARD, BACKWARD}, {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}):
                found = " ".join(LETTERS[kind] for kind in LETTERS if kind in here) or "nothing"
                problems.append(
                    Violation(
                        where,
                        f"stage {stage}, micro-batch {micro_batch} has {found}; F B or F I W is allowed",
                    )
                )
    return problems
