"""One round of a single stage: a few micro-batches forward, then backward, then an update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from weft.describe.model import ModelConfig
from weft.run.accelerator import finish
from weft.run.parallel.loss_input import DividesOutput
from weft.run.parallel.tensor_stage import SummedGradients
from weft.run.stage.stage_module import RunnableStage
from weft.run.state.precision import at_least_fp32

IN_FLIGHT = 4


def stage_inputs(
    stage: RunnableStage,
    config: ModelConfig,
    first_layer: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a micro-batch for a stage that begins at `first_layer`: token ids, pixels or hidden states."""
    shape = stage.input_shape(size, config.sequence)
    generator = torch.Generator().manual_seed(first_layer)
    if first_layer == 0 and config.reads_images:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(device)
    if first_layer == 0:
        return torch.randint(config.vocabulary, shape, generator=generator).to(device)
    return torch.randn(shape, generator=generator, dtype=dtype).to(device)


def one_round(
    stage: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    *,
    ends: bool,
    summed: Sequence[SummedGradients] = (),
) -> tuple[float, float, float]:
    """Return the seconds of one forward, one backward and one update.

    `IN_FLIGHT` micro-batches run forward, then backward in the same order, as in a pipeline. A stage that
    `ends` in the head computes the loss. If tensor ranks divide the stage, all of them call it at once. The
    gradients they add up once a step (`summed`) count with the update.
    """
    clock = _clock_of(inputs.device)
    contexts = []
    begin = clock()
    for _ in range(IN_FLIGHT):
        leaf = inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs
        output = stage(leaf)
        contexts.append(_loss(stage, output) if ends else output)
    forwarded = clock()
    for output in contexts:
        torch.autograd.backward((output,), (torch.ones_like(output),))
    backwarded = clock()
    for one in summed:
        one.add_up()
    optimizer.step()
    stage.zero_grad(set_to_none=False)
    updated = clock()
    return (
        (forwarded - begin) / IN_FLIGHT,
        (backwarded - forwarded) / IN_FLIGHT,
        updated - backwarded,
    )


def _loss(stage: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the stage's logits, or of its share of them."""
    output = at_least_fp32(output)
    targets = torch.zeros(output.shape[:-1], dtype=torch.long, device=output.device)
    share = stage.divided(output) if isinstance(stage, DividesOutput) else None
    if share is not None:
        return share.cross_entropy(targets)
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def _clock_of(device: torch.device) -> Callable[[], float]:
    def clock() -> float:
        finish(device)
        return time.perf_counter()

    return clock
