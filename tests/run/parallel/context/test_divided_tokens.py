"""Law: the loss over shares of the tokens is that of all of them, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from weft.describe.replica_grid import ReplicaGrid
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.transport.host_group import HostGroup
from weft.training.tasks.base import cross_entropy, most_likely

pytestmark = pytest.mark.processes

IGNORED = -7


def compare(rank: int, ranks: int, tp: int) -> float:
    """The largest difference between shares and the whole, over uneven masks and all ways to the loss.

    Of the ranks `tp` neighbours divide the vocabulary.
    """
    grid = ReplicaGrid(tp, ranks // tp)
    tensor_share, context_share, _ = grid.shares(rank)
    group, columns = ContextRanks(*context_share), TensorRanks(*tensor_share)
    for axis, groups in zip((columns, group), grid.groups(range(ranks))[:2], strict=True):
        made = {members: dist.new_group(members) for members in groups}
        axis.connect(HostGroup(next(one for members, one in made.items() if rank in members)))
    mine = slice(columns.share(5).start, columns.share(5).stop)
    worst = 0.0
    for seed, left_out in ((1, slice(0, 0)), (2, slice(2, None)), (3, slice(0, -1))):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3, 4 * group.size, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, logits.shape[:2], generator=generator)
        targets[:, left_out] = IGNORED
        whole = logits.clone().requires_grad_()
        expected = 3.0 * cross_entropy(whole, targets, IGNORED)
        expected.backward()
        for way in ("tokens", "columns", "whole", "mean"):
            own = group.own_tokens(logits)[..., mine].clone().requires_grad_()
            divided = DividedTokens(own if tp == 1 else DividedLogits(own, 5, columns), group)
            if way == "mean":
                own_targets = divided.own_targets(targets).flatten()
                sums = torch.nn.functional.cross_entropy(
                    divided.own.flatten(0, 1), own_targets, ignore_index=IGNORED, reduction="sum"
                )
                loss = 3.0 * divided.mean(sums, (own_targets != IGNORED).sum())
            else:
                given = {"tokens": divided, "columns": divided.with_all_tokens(), "whole": divided.whole()}
                outputs = given[way]
                loss = 3.0 * cross_entropy(outputs, targets, IGNORED)
            loss.backward()
            assert torch.equal(most_likely(divided.detach()), logits.argmax(-1))
            differences = (loss - expected, own.grad - group.own_tokens(whole.grad)[..., mine])
            worst = max([worst, *(one.detach().abs().max().item() for one in differences)])
    return worst


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (3, 1), (4, 2)])
def test_shares_give_the_loss_and_the_gradient_of_the_whole(
    worker_pool: WorkerPool, ranks: int, tp: int
) -> None:
    assert max(worker_pool.run(compare, tp, ranks=ranks)) < 1e-14
