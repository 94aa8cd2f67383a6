"""Times of collectives by number of ranks and by bytes, by the transport of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.capture.timing import Timing, slowest, summarise
from weft.run.accelerator import finish
from weft.run.runtime import TIMEOUT_S
from weft.run.transport.device_group import DeviceGroup
from weft.run.transport.transports import transport_of

ROUNDS = 12

# The calls of a run for its gradients and weights, on all bytes and on this rank's share of them.
CALLS: dict[str, Callable[[DeviceGroup, torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda group, whole, share: group.add_up(whole),
    "reduce_scatter": lambda group, whole, share: group.reduce_scatter(whole),
    "all_gather": lambda group, whole, share: group.all_gather(whole, share),
}


def rank_counts(ranks: int) -> tuple[int, ...]:
    """Return the numbers of ranks to measure among so many: powers of two, and all of them."""
    return tuple(sorted({ranks, *(2**power for power in range(1, ranks.bit_length()))} - {1}))


def measure_collectives(
    counts: Sequence[int],
    device: torch.device,
    sizes: Sequence[int],
    each: Callable[[Iterable[int]], Iterable[int]],
) -> dict[str, dict[int, tuple[tuple[float, float], ...]]]:
    """Return the tables of `collective_tables` by collective and number of ranks; {} without any number."""
    tables = {count: collective_tables(count, device, sizes, each) for count in counts}
    return {name: {count: table[name] for count, table in tables.items()} for name in CALLS if tables}


def collective_tables(
    ranks: int,
    device: torch.device,
    sizes: Sequence[int],
    each: Callable[[Iterable[int]], Iterable[int]] = iter,
    *,
    name: str = "measured",
    rounds: int = ROUNDS,
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Time collectives in groups of `ranks` neighbours; all ranks of the job call it and get the result.

    As many groups as there are work at once, as in a run.

    Args:
        sizes: bytes of all ranks together, which are rounded up to equal shares.
        each: yields the sizes of a collective, and counts them.
        name: of the measurement, new in this job for this number of ranks.
        rounds: calls of each, of which the first two do not count.

    Returns:
        By collective: (bytes, seconds of the slowest rank), in the order of `sizes`.
    """
    first = dist.get_rank() // ranks * ranks
    # The last ranks may be too few for one more group.
    meets = first + ranks <= dist.get_world_size()
    transport, timeout = transport_of(None, device), timedelta(seconds=TIMEOUT_S)
    members, opened = range(first, first + ranks), f"{name} {ranks} from {first}"
    with closing(transport.open_group(opened, members, timeout)) if meets else nullcontext() as group:
        return {
            collective: tuple(_timed(call, ranks, group, size, device, rounds) for size in each(sizes))
            for collective, call in CALLS.items()
        }


def _timed(
    call: Callable[[DeviceGroup, torch.Tensor, torch.Tensor], object],
    ranks: int,
    group: DeviceGroup | None,
    size: int,
    device: torch.device,
    rounds: int,
) -> tuple[float, float]:
    share = torch.zeros(-(-size // 4 // ranks), dtype=torch.float32, device=device)
    whole, seconds = share.repeat(ranks), []
    dist.barrier()
    if group is not None:
        for _ in range(rounds):
            start = time.perf_counter()
            call(group, whole, share)
            finish(device)
            seconds.append(time.perf_counter() - start)
    timing = slowest(summarise(seconds[2:]) if seconds else Timing(0.0, 0.0))
    return float(whole.nbytes), timing.seconds
