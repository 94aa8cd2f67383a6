"""Law: the loss over shares of the tokens is that of all of them, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from weft.run.context_parallel import ContextRanks
from weft.run.divided_tokens import DividedTokens
from weft.training.tasks.base import cross_entropy, most_likely

pytestmark = pytest.mark.processes

IGNORED = -7


def compare(rank: int, ranks: int) -> float:
    """The largest difference between shares and the whole, over uneven masks and two ways to the loss."""
    group = ContextRanks(rank, ranks)
    group.connect(dist.group.WORLD)
    worst = 0.0
    for seed, left_out in ((1, slice(0, 0)), (2, slice(2, None)), (3, slice(0, -1))):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3, 4 * ranks, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, logits.shape[:2], generator=generator)
        targets[:, left_out] = IGNORED
        whole = logits.clone().requires_grad_()
        expected = 3.0 * cross_entropy(whole, targets, IGNORED)
        expected.backward()
        for way in ("tokens", "whole", "mean"):
            own = group.own_tokens(logits).clone().requires_grad_()
            divided = DividedTokens(own, group)
            if way == "mean":
                own_targets = divided.own_targets(targets).flatten()
                sums = torch.nn.functional.cross_entropy(
                    own.flatten(0, 1), own_targets, ignore_index=IGNORED, reduction="sum"
                )
                loss = 3.0 * divided.mean(sums, (own_targets != IGNORED).sum())
            else:
                outputs = divided if way == "tokens" else divided.whole()
                loss = 3.0 * cross_entropy(outputs, targets, IGNORED)
            loss.backward()
            assert torch.equal(most_likely(divided.detach()), logits.argmax(-1))
            differences = (loss - expected, own.grad - group.own_tokens(whole.grad))
            worst = max([worst, *(one.detach().abs().max().item() for one in differences)])
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_give_the_loss_and_the_gradient_of_the_whole(worker_pool: WorkerPool, ranks: int) -> None:
    assert max(worker_pool.run(compare, ranks=ranks)) < 1e-14
