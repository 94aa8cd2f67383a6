"""Stages with layers that `torch.compile` compiles before the first step.

Every layer is compiled by itself. Layers of one kind and shape share one compilation, whatever their number.
The borders between layers, where a stage recomputes, stay. Tensor ranks' layers are compiled in parts: their
exchanges stay between them, and run as they would without a compiler.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._inductor import config as inductor_config

from weft.describe.plan import Recompute
from weft.errors import InputError, Violation
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.parallel.tensor_stage import tensor_ranks
from weft.run.stage.layers import LayerFunction, layer_functions, run_layers
from weft.run.stage.stage_pass import draws_numbers
from weft.run.state.precision import lower_precision
from weft.sync.base import Group


def compile_stage(
    stage: nn.Module, inputs: torch.Tensor, *, dtype: torch.dtype, recompute: Recompute
) -> None:
    """Compile the layers of a stage in place; names and values of its parameters and buffers stay.

    A copy of the stage runs forward and backward once, and forward in an evaluation. So no step waits for
    the compiler.

    Args:
        inputs: inputs like one micro-batch's, on the stage's device; they need a gradient if a step's do.
        dtype: the type in which the stage will compute.
        recompute: the plan's word for what the stage keeps for its backward passes.

    Raises:
        InputError: when a layer cannot be compiled whole, with the reason.
    """
    # A stage has few layers to compile: one process is done before a pool of them would start.
    inductor_config.compile_threads = 1
    # torch counts compilations per function, and layers of one class share their function.
    limit = 4 * len(layer_functions(stage, inputs))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    ranks = tensor_ranks(stage)
    # Compiled code belongs to the exchanges that it calls, so the copy has the same ones.
    trial = copy.deepcopy(stage, {id(ranks): ranks})
    lower_precision(trial.parameters(), dtype)
    if ranks.size > 1:
        _exchange_between_parts(ranks)
    for each in (trial, stage):
        for function in layer_functions(each, inputs):
            _compile(each, function, whole=ranks.size == 1)
    try:
        ranks.connect(cast(Group, _Alone(ranks.size, ranks.place)))
        _run_once(trial, inputs, recompute)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"a layer of {type(stage).__name__} cannot be compiled: {reason}"
        raise InputError(Violation("train.compile", problem, "false")) from error
    finally:
        ranks.disconnect()


class _Alone:
    """The part of a group that layers call, for a trial on one rank: it keeps this rank's values."""

    def __init__(self, size: int, place: int) -> None:
        self.size, self.place = size, place

    def add_up(self, flat: torch.Tensor) -> None:
        """Leave it."""

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.size, -1)[self.place].clone()

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        flat.view(self.size, -1).copy_(share)


def _exchange_between_parts(ranks: TensorRanks) -> None:
    """Keep the exchanges of tensor ranks out of what is compiled."""
    for name in ("enter", "leave", "whole_stream", "gather"):
        setattr(ranks, name, torch.compiler.disable(getattr(ranks, name)))


def _compile(stage: nn.Module, function: LayerFunction, *, whole: bool) -> None:
    """Compile a layer in place: a module, a module with further arguments, or a method of the stage."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        # Like `nn.Module.compile`, which does not take torch's own modules.
        function._compiled_call_impl = _compiled(functools.partial(_call, function), whole=whole)
    elif getattr(function, "__self__", None) is stage:
        setattr(stage, function.__name__, _compiled(function, whole=whole))


def _compiled(function: Callable[..., torch.Tensor], *, whole: bool) -> Callable[..., torch.Tensor]:
    # Dropout draws the same numbers as without compiling, and again when a layer runs again.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
    compiled: Callable[..., torch.Tensor] = torch.compile(
        function, dynamic=False, fullgraph=whole, options=options
    )
    return compiled


def _call(module: nn.Module, *inputs: torch.Tensor, **others: Any) -> torch.Tensor:
    output: torch.Tensor = module._call_impl(*inputs, **others)
    return output


def _run_once(stage: nn.Module, inputs: torch.Tensor, recompute: Recompute) -> None:
    functions, draws = layer_functions(stage, inputs), draws_numbers(stage)
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        output = run_layers(functions, inputs, recompute=recompute, draws=draws)
        output.backward(torch.zeros_like(output))
        # An evaluation runs it so. The compiler takes no parameter with a gradient of another precision, as
        # those of bf16 have once the run has begun.
        stage.eval().zero_grad(set_to_none=True)
        with torch.no_grad():
            run_layers(functions, inputs.detach(), recompute="none", draws=False)
