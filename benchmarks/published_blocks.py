"""Encoder blocks on a P100 as the authors of PipeFisher measured them, and pipelines of them.

Times are those of prof/bert-base_time_memory_p100.csv and prof/bert-large_time_memory_p100.csv of
github.com/kazukiosawa/pipe-fisher at 753fdf0, in ms per block, at a sequence length of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pipefisher_model import StageSeconds

from weft.methods.bubble_filling.steps import device_steps
from weft.methods.bubble_filling.work import DeviceStep, PassName, WorkItem
from weft.predict.abstract import simulate_schedule

# The sides of the factors of a block's six linear layers, in hidden sizes: inputs, then outputs.
SIDES: dict[PassName, tuple[int, ...]] = {"forward": (1, 1, 1, 1, 1, 4), "backward": (1, 1, 1, 1, 4, 1)}


@dataclass(frozen=True)
class Block:
    """Times of one block, in ms: those of a micro-batch, but for inversions and preconditioning."""

    forward_ms: float
    backward_ms: float
    curvature_ms: float
    inversion_ms: float
    precondition_ms: float

    def stage(self, blocks: int) -> StageSeconds:
        times = (
            self.forward_ms,
            self.backward_ms,
            self.curvature_ms,
            self.inversion_ms,
            self.precondition_ms,
        )
        forward, backward, curvature, inversion, precondition = (blocks * one / 1e3 for one in times)
        return StageSeconds(
            forward_s=forward,
            backward_s=backward,
            curvature_s=curvature,
            inversion_s=inversion,
            precondition_s=precondition,
        )


BASE_8 = Block(2.734088897705078, 4.651045799255371, 6.80391788482666, 71.64356708526611, 6.853270530700684)
BASE_32 = Block(
    9.748101234436035, 16.45023822784424, 25.546598434448242, 71.66688442230225, 6.805300712585449
)
LARGE_32 = Block(
    16.100358963012695, 26.9528865814209, 43.4995174407959, 126.70085430145264, 14.734029769897461
)


def nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def pipeline(
    block: Block,
    schedule: str,
    devices: int,
    micro_batches: int,
    *,
    blocks: int = 3,
    loops: int | None = None,
) -> list[DeviceStep]:
    """One step of each device, from the begin of the first to the end of the last, in whole ns."""
    share = 1 if loops is None else loops
    forward, backward = (nanoseconds(blocks * one / share) for one in (block.forward_ms, block.backward_ms))
    figures = simulate_schedule(
        schedule,
        devices=devices,
        loops=loops,
        micro_batches=micro_batches,
        forward=Fraction(share * forward, 10**9),
        backward=Fraction(share * backward, 10**9),
    )
    return device_steps(figures.program, figures.timeline)


def work(
    block: Block, step: DeviceStep, *, blocks: int = 3, cuts: int = 1, owners: int = 1
) -> tuple[WorkItem, ...]:
    """Curvature and inversions of each linear layer of a device's stages, without communication.

    Curvature takes the square of a side, inversions the cube. `cuts` divides inversions into equal pieces.
    With two `owners` of a stage, a device inverts every second factor.
    """
    stages = sorted({one.stage for one in step.busy if one.ends is not None})
    curvatures: list[WorkItem] = []
    inversions: list[WorkItem] = []
    for follows, sides in SIDES.items():
        for stage in stages:
            seen = [one.micro_batch for one in step.busy if (one.ends, one.stage) == ("forward", stage)]
            for number, side in enumerate(sides * blocks):
                name, place = f"{follows} factor {number} of stage {stage}", len(curvatures)
                total = nanoseconds(block.curvature_ms * side**2 / 42 * len(seen))
                pieces = (total // len(seen) / 1e9,) * len(seen)
                curvatures.append(WorkItem(f"curvature, {name}", stage, pieces, tuple(seen), follows))
                seconds = nanoseconds(block.inversion_ms * side**3 / 138) / 1e9
                if place % owners == 0:
                    pieces = (seconds / cuts,) * cuts
                    inversions.append(WorkItem(f"inversion, {name}", stage, pieces, after=(place,)))
    return (*curvatures, *inversions)


def owners_of(schedule: str) -> int:
    """The devices that hold a stage."""
    return 2 if schedule == "chimera" else 1


def works(
    block: Block, schedule: str, steps: Sequence[DeviceStep], cuts: int = 1
) -> list[tuple[WorkItem, ...]]:
    return [work(block, step, cuts=cuts, owners=owners_of(schedule)) for step in steps]
