"""Law: cross entropy over shares of the vocabulary is that of all logits, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from weft.run.parallel.divided_logits import DividedLogits
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.transport.host_group import HostGroup
from weft.training.tasks.base import cross_entropy, most_likely

pytestmark = pytest.mark.processes

# (shape of the targets, vocabulary, scale of the logits)
CASES = (((5,), 7, 1.0), ((2, 3), 12, 1.0), ((2, 3), 4, 1e4), ((4, 4), 3, 0.0))
IGNORED = -7


def compare(rank: int, ranks: int) -> float:
    """The largest difference between shares and the whole, over all cases."""
    group = TensorRanks(rank, ranks)
    group.connect(HostGroup(dist.group.WORLD))
    worst = 0.0
    for number, (shape, vocabulary, scale) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        logits = scale * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
        targets = torch.randint(vocabulary, shape, generator=generator)
        targets.view(-1)[1] = IGNORED
        whole = logits.clone().requires_grad_()
        expected = 3.0 * cross_entropy(whole, targets, IGNORED)
        expected.backward()
        share = group.share(vocabulary)
        columns = slice(share.start, share.stop)
        for through_shares in (True, False):
            own = logits[..., columns].clone().requires_grad_()
            divided = DividedLogits(own, vocabulary, group)
            outputs = divided if through_shares else divided.whole()
            loss = 3.0 * cross_entropy(outputs, targets, IGNORED)
            loss.backward()
            assert torch.equal(most_likely(divided.detach()), logits.argmax(-1)) or scale == 0.0
            differences = (loss - expected, own.grad - whole.grad[..., columns])
            worst = max([worst, *(one.detach().abs().max().item() for one in differences)])
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_give_the_loss_and_the_gradient_of_the_whole(worker_pool: WorkerPool, ranks: int) -> None:
    # Losses of the largest logits are about 1e4.
    assert max(worker_pool.run(compare, ranks=ranks)) < 1e-11
