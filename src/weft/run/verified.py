"""The check that every rank runs the verified program, by the digests of the ranks' parts.

The launcher compiles and verifies the whole program once; without a launcher, rank 0 does. Every other rank
compiles its own part alone, and runs it only if its digest is the verified one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from weft.errors import InputError, Violation
from weft.program.arrays import Ids
from weft.program.rank_program import RankProgram


def require_verified(parts: Sequence[RankProgram], digests: Sequence[Ids] | None) -> None:
    """Refuse parts that differ from the verified programs; every rank of the job calls it.

    Args:
        parts: this rank's parts, one of each program.
        digests: on rank 0, the digests of all ranks for each program; None if it refuses the programs.
            Ignored on other ranks.

    Raises:
        InputError: on every rank, if rank 0 refuses the programs or any rank has compiled another part.
    """
    told = _from_first_rank(digests, len(parts))
    if told is None:
        if dist.get_rank() != 0:
            raise InputError(Violation("program", "rank 0 has refused it"))
        return
    ranks = dist.get_world_size()
    same = told == [part.digest for part in parts]
    first = torch.tensor([ranks if same else dist.get_rank()])
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if int(first) < ranks:
        problem = f"rank {int(first)} has compiled another part of it than was verified"
        raise InputError(Violation("program", problem, "the same weft and methods for all ranks"))


def _from_first_rank(digests: Sequence[Ids] | None, count: int) -> list[int] | None:
    """Return the digests of this rank's parts, received from rank 0; None if rank 0 refuses the programs."""
    own = torch.zeros(1 + count, dtype=torch.int64)
    if dist.get_rank() != 0:
        dist.scatter(own, src=0)
    else:
        ranks = dist.get_world_size()
        table = np.zeros((ranks, 1 + count), dtype=np.uint64)
        if digests is not None:
            table[:, 0] = 1
            table[:, 1:] = np.stack(digests, axis=1)
        dist.scatter(own, list(torch.from_numpy(table.view(np.int64))), src=0)
    accepted, *found = own.numpy().view(np.uint64).tolist()
    return found if accepted else None
