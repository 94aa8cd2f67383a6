"""Loss kernels on a rank: chunks of weft's own, and the fused kernel of Liger Kernel.

Both compute the gradients of the vectors and of the weight in the forward pass, where they have the logits.
The backward pass multiplies them by the gradient of the loss (Hsu et al., arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.describe.layer_choices import Value
from weft.describe.loss_choice import CHUNKED, FUSED
from weft.errors import InputError, Violation
from weft.methods.loss_kernels.runtime.chunked import ChunkedLogits
from weft.methods.loss_kernels.runtime.fused import FusedLogits
from weft.run.parallel.unmade_logits import LossKernel
from weft.run.stage.layer_choices import RunChoice
from weft.run.stage.stage_module import StageModule


def run_chunked(stage: nn.Module, layer: int, value: Value) -> None:
    """Compute the loss of a stage in chunks of `value` tokens, or by size.

    Raises:
        InputError: when its head is no product with a vocabulary.
    """
    _give(stage, partial(ChunkedLogits, chunks=value))


def run_fused(stage: nn.Module, layer: int, value: Value) -> None:
    """Compute the loss of a stage by the fused kernel.

    Raises:
        InputError: when its head is no product with a vocabulary.
    """
    _give(stage, FusedLogits)


def _give(stage: nn.Module, kernel: LossKernel) -> None:
    if not isinstance(stage, StageModule) or not stage.token_table:
        raise InputError(Violation("plan.loss", "only heads over a vocabulary leave their logits", "whole"))
    stage.loss_kernel = kernel


PARTS = (RunChoice(name=CHUNKED, apply=run_chunked), RunChoice(name=FUSED, apply=run_fused))
