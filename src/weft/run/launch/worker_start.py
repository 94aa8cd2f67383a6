"""`start_worker`: the first call of a worker, under weft's agent, plain `torchrun` or alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

# Its functions bind the default group at import time as a default argument. A later import, as by optimizers,
# would keep the job's group and its threads alive until the interpreter ends. This sometimes aborts the
# process.
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from weft.errors import InputError, RunError, Violation
from weft.run.accelerator import device_count, take_device
from weft.run.launch.lifeline import die_with_parent
from weft.run.launch.nodes import JobNodes, RankPlace
from weft.run.launch.threads import threads_per_rank

START_TIMEOUT_S = 120.0
# More ranks let gloo connect two of them when they first meet. At once, each would have a file for every
# other one, and ask the store for its address. But a wait for a rank that was never met cannot be cut off.
MOST_AT_ONCE = 256
ON_DEMAND = "TORCH_GLOO_LAZY_INIT"
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The rank, device and threads of this worker. `device` is a name that `torch.device` takes."""

    rank: int
    world_size: int
    local_rank: int
    device: str
    threads: int
    met: JobNodes | None = None

    @property
    def nodes(self) -> JobNodes:
        """The nodes of the job; one, unless they have met."""
        return self.met or JobNodes.one(self.rank, self.world_size)

    def close(self) -> None:
        """Leave the job; every rank must call this when it has finished."""
        dist.destroy_process_group()


def start_worker(
    *,
    transport: str | None = None,
    timeout_s: float = START_TIMEOUT_S,
    store: dist.Store | None = None,
    ranks: int | None = None,
) -> WorkerContext:
    """Tie this process to its parent, set its threads and join the job's process group (gloo).

    It reads the variables of `torchrun` (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, OMP_NUM_THREADS). Without RANK the job is this process alone. On a machine with CUDA devices
    each rank has its own; otherwise each rank has its share of the cores. With the transport `host`, ranks
    may share devices, in turn. With a `store`, ranks meet there. `ranks` are those without spares.

    Raises:
        InputError: when the environment is incomplete, or the machine has no device for this rank.
        RunError: when the address is taken, or the ranks did not meet within `timeout_s`.
    """
    context, timeout = own_context(transport), timedelta(seconds=timeout_s)
    context = replace(context, world_size=ranks or context.world_size)
    rank, world_size = context.rank, context.world_size
    if world_size > MOST_AT_ONCE:
        os.environ.setdefault(ON_DEMAND, "1")
    try:
        if store is None:
            store = dist.HashStore() if "RANK" not in os.environ else job_store(rank, world_size, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RunError(_why_not_met(error, rank, world_size, timeout_s)) from error
    return context


def job_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store of the job, at MASTER_ADDR and MASTER_PORT, as one start of its ranks sees it.

    The agents of torchrun keep one store for all starts (torch 2.13). So each start has keys of its own: it
    would else meet the ranks of the one before.

    Raises:
        DistError: if not all ranks come in time.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return store  # type: ignore[no-any-return]
    # torch counts the restarts of each agent by itself, so a new node has another count.
    whole = store.underlying_store if isinstance(store, dist.PrefixStore) else store
    return store_of_start(whole, rank, world_size, timeout)


def store_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the part of a store that the ranks of one start use. Their rank 0 names it.

    Each other rank asks for the name under a new key. So none takes the name of an earlier start.
    """
    if rank:
        own = uuid4().hex
        store.set(f"weft asks {store.add('weft asking', 1)}", own)
        name = store.get(f"weft start of {own}").decode()
        store.add(f"weft came {name}", 1)
        return dist.PrefixStore(name, store)
    name, answered, ends_s = uuid4().hex, 0, time.monotonic() + timeout.total_seconds()
    unanswered: set[int] = set()
    while store.add(f"weft came {name}", 0) < world_size - 1:
        asked = store.add("weft asking", 0)
        unanswered |= set(range(answered + 1, asked + 1))
        answered = asked
        # Whoever was killed between its two calls leaves a number without a key.
        for number in [one for one in unanswered if store.check([f"weft asks {one}"])]:
            store.set(f"weft start of {store.get(f'weft asks {number}').decode()}", name)
            unanswered.remove(number)
        if time.monotonic() > ends_s:
            raise dist.DistStoreError(f"not all of {world_size} ranks came: timed out")
        time.sleep(_POLL_S)
    return dist.PrefixStore(name, store)


def own_context(transport: str | None = None) -> WorkerContext:
    """Tie this process to its parent and set its threads, as `start_worker`, but join nobody.

    Raises:
        InputError: when the environment is incomplete, or the machine has no device for this rank.
    """
    if "RANK" in os.environ:
        die_with_parent(os.getppid())
    rank, world_size, local_rank, local_ranks = RankPlace.of()
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or threads_per_rank(local_ranks)
    torch.set_num_threads(threads)
    return WorkerContext(rank, world_size, local_rank, _device(local_rank, local_ranks, transport), threads)


def _device(local_rank: int, local_ranks: int, transport: str | None) -> str:
    count = device_count()
    if count == 0:
        return "cpu"
    return take_device(device_index(local_rank, local_ranks, count, transport))


def device_index(local_rank: int, local_ranks: int, devices: int, transport: str | None) -> int:
    """Return the device of a rank on a machine with so many devices; NCCL needs one for each rank.

    Raises:
        InputError: for more ranks than devices with a transport other than `host`.
    """
    if devices < local_ranks and transport != "host":
        problem = f"{local_ranks} local ranks need a CUDA device each, this machine has {devices}"
        raise InputError(Violation("worker", problem, f'{devices} ranks, or [run] transport = "host"'))
    return local_rank % devices


def _why_not_met(error: Exception, rank: int, world_size: int, timeout_s: float) -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text:
        return f"rank {rank}: the port of {address} is in use; choose another one (torchrun --master-port)"
    if isinstance(error, dist.DistStoreError) or "imeout" in text or "timed out" in text:
        return f"rank {rank}: not all of {world_size} ranks met at {address} within {timeout_s:g} s"
    return f"rank {rank}: cannot join the {world_size} ranks at {address}: {text.strip().splitlines()[0]}"
