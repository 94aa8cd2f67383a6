"""Batch norms: torch's own values, statistics that move once per step, whatever is run again or left out."""

from __future__ import annotations

import pytest
import torch
from convolutional_jobs import MOMENTUM
from torch import nn

from weft.methods.recomputation.runtime import recomputed
from weft.run.stage.batch_norm import StepBatchNorm, hold_statistics, use_step_batch_norms
from weft.run.stage.statistics import Counting, StageStatistics


def maps(key: int, samples: int = 3) -> torch.Tensor:
    return torch.randn(samples, 2, 4, 4, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def norm() -> StepBatchNorm:
    made = StepBatchNorm(2, eps=1e-5, momentum=MOMENTUM).double()
    hold_statistics(made, torch.float64)
    return made


def test_one_micro_batch_per_step_is_torchs_own() -> None:
    ours, theirs = norm(), nn.BatchNorm2d(2).double()
    for step in range(3):
        torch.testing.assert_close(ours(maps(step)), theirs(maps(step)))
        ours.count()
        ours.end_step()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(maps(9)), theirs(maps(9)))


def test_the_order_of_micro_batches_changes_nothing() -> None:
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        one = norm()
        for key in order:
            one(maps(key))
            one.count()
        one.end_step()
        found.append(one.statistics())
    torch.testing.assert_close(found[0], found[1])


def test_a_layer_that_is_run_again_is_counted_once_and_its_graph_stays_valid() -> None:
    kept, again = norm(), norm()
    for one, recomputes in ((kept, False), (again, True)):
        outputs = []
        for key in range(3):
            inputs = maps(key).requires_grad_()
            outputs.append(recomputed(one, inputs, draws=False) if recomputes else one(inputs))
            one.count()
        # Backward in another order than forward.
        for output in outputs:
            output.square().sum().backward()
        one.end_step()
    torch.testing.assert_close(kept.statistics(), again.statistics())
    assert kept.weight.grad is not None
    torch.testing.assert_close(kept.weight.grad, again.weight.grad)


def test_a_step_that_is_left_out_moves_nothing_and_leaves_nothing_behind() -> None:
    one, whole = norm(), norm()
    for key, lost in enumerate((True, False, True, False)):
        one(maps(key) * (float("nan") if lost else 1.0))
        one.count()
        one.end_step(torch.tensor(float(lost)))
        if not lost:
            whole(maps(key))
            whole.count()
            whole.end_step()
        assert [value.tolist() for value in one.statistics()] == [one.tolist() for one in whole.statistics()]
        assert one.num_batches_tracked.item() == whole.num_batches_tracked.item()


def test_statistics_are_held_in_fp32_or_wider() -> None:
    one = StepBatchNorm(2, eps=1e-5, momentum=MOMENTUM).to(torch.bfloat16)
    hold_statistics(one, torch.bfloat16)
    assert one(maps(0).bfloat16()).dtype == torch.bfloat16
    one.count()
    one.end_step()
    assert {value.dtype for value in one.statistics()} == {torch.float32}
    one.eval()
    assert one(maps(0).bfloat16()).dtype == torch.bfloat16


def test_every_batch_norm_of_a_module_is_replaced() -> None:
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)))
    names = list(module.state_dict())
    use_step_batch_norms(module)
    assert list(module.state_dict()) == names
    assert [type(part) for part in module.modules() if isinstance(part, nn.BatchNorm2d)] == [
        StepBatchNorm
    ] * 2
    assert isinstance(module[0], Counting)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.BatchNorm2d(2)])
def test_stages_without_such_statistics_have_none(module: nn.Module) -> None:
    statistics = StageStatistics(module, 1.0, ())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    statistics.count()
    statistics.end_step()
    statistics.average()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
