"""`export_module`: the operators of a user's module as one graph, by `torch.export` and without data.

The module is exported with fake parameters in a precision of its own, fp64. So a type in the graph follows
the precision of the computations if it is fp64. Any other type is fixed in the user's code. The batch, the
first axis of every input, stays a symbol.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from weft.capture.model_arguments import BUILD, examples_of
from weft.describe.units import shown
from weft.errors import InputError, Violation
from weft.installed import failure, is_library

_BATCH = 2

Example = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ExportedModule:
    """The graph of a module's operators.

    Attributes:
        graph: its placeholders are parameters, buffers, constants, then the inputs of a sample.
        tensors: by placeholder, the name and the value of each parameter, buffer and constant.
        inputs: the placeholders of the inputs, in order.
        dtype: the type of values that have the precision of the computations.
        modules: the user's module and its parts, by their paths.
        examples: each input of one sample.
    """

    graph: torch.fx.Graph
    tensors: Mapping[str, tuple[str, torch.Tensor]]
    inputs: tuple[str, ...]
    dtype: torch.dtype
    modules: Mapping[str, nn.Module]
    examples: tuple[torch.Tensor, ...]


def export_module(module: nn.Module, example: Example) -> ExportedModule:
    """Export a module that returns one tensor, or a model of `transformers`.

    Raises:
        InputError: when the module has control flow by values, a fixed batch, a state that changes, or more
            than one result.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise InputError(Violation(BUILD, f"{shown(module)}: must be a plain torch module"))
    named = dict(example) if isinstance(example, Mapping) else None
    examples = examples_of(example if named is None else named.values())
    called = _Single(module, None if named is None else tuple(named))
    try:
        program, dtype = _export(called, examples, torch.float64), torch.float64
    except Exception as error:
        # A module that fixes a type in its code may still run in its own.
        dtype = _own_dtype(module)
        try:
            program = _export(called, examples, dtype)
        except Exception:
            raise InputError(Violation(BUILD, _reason(error, module))) from None
    return _read(program, called, dtype, examples)


class _Single(nn.Module):
    """A model of `transformers` with one result: its logits, or its last hidden states."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] | None) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *inputs: torch.Tensor) -> Any:
        if self._names is None:
            result = self.model(*inputs)
        else:
            result = self.model(**dict(zip(self._names, inputs, strict=True)))
        if isinstance(result, Mapping):
            result = result.get("logits", result.get("last_hidden_state", result))
        return result


def _own_dtype(module: nn.Module) -> torch.dtype:
    floating = (one.dtype for one in module.parameters() if one.is_floating_point())
    return next(floating, torch.get_default_dtype())


def _export(module: _Single, examples: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        fakes = {id(one): _fake(one, dtype) for one in [*module.parameters(), *module.buffers(), *examples]}
        inputs = tuple(fakes[id(one)].expand(_BATCH, *one.shape[1:]).clone() for one in examples)
    copied = copy.deepcopy(module, dict(fakes))
    config = getattr(copied.model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    batch = torch.export.Dim("batch")
    shapes = {"inputs": tuple({0: batch} for _ in inputs)}
    with _quiet(dtype):
        return torch.export.export(copied, inputs, dynamic_shapes=shapes, strict=False)


def _fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data, on the CPU and in the precision of the export."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    fake = torch.empty(tensor.shape, dtype=kind)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextmanager
def _quiet(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have this type, and hide what torch reports about modules of its own."""
    before, disabled = torch.get_default_dtype(), logging.root.manager.disable
    torch.set_default_dtype(dtype)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
        logging.disable(disabled)


def _reason(error: Exception, module: nn.Module) -> str:
    """Return one line about an export that failed."""
    if (
        fixed := re.search(r"batch.{0,80}?specialized.{0,40}?constant \((\d+)\)", str(error), re.S)
    ) is not None:
        problem = f"its code fixes the batch to {fixed[1]} samples; take it from an input's size"
        return f"{problem}{_place_of(module)}"
    told = failure(error)
    if not told.endswith(")"):
        told += _place_of(module)
    if isinstance(error, GuardOnDataDependentSymNode):
        told = f"its control flow or sizes depend on values of tensors{told[told.rfind(' (') :]}"
    return f"the module cannot be captured: {told}"


def _read(
    program: Any, called: _Single, dtype: torch.dtype, examples: tuple[torch.Tensor, ...]
) -> ExportedModule:
    signature = program.graph_signature
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise InputError(Violation(BUILD, f"the module changes its state: {spec.target}"))
    if len(signature.output_specs) != 1:
        problem = f"the module returns {len(signature.output_specs)} tensors; one is needed, for the loss"
        raise InputError(Violation(BUILD, f"{problem}{_place_of(called.model)}"))
    user = called.model
    # A tensor with several names has the first one everywhere.
    named = [*user.named_parameters(), *user.named_buffers()]
    first = {id(tensor): name for name, tensor in named}
    tensors, inputs = {}, []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
            continue
        tensor: torch.Tensor
        if spec.kind is InputKind.PARAMETER:
            tensor = called.get_parameter(spec.target)
        elif spec.kind is InputKind.BUFFER:
            tensor = called.get_buffer(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            tensor = program.constants[spec.target]
        else:
            raise InputError(Violation(BUILD, f"the module has an input that is no tensor: {spec.target}"))
        tensors[spec.arg.name] = (first.get(id(tensor), spec.target), tensor)
    return ExportedModule(program.graph, tensors, tuple(inputs), dtype, dict(user.named_modules()), examples)


def _place_of(module: nn.Module) -> str:
    """Return file and line of the code of a user's module; empty for a library's."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or is_library(code.co_filename):
        return ""
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"


_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def place(node: torch.fx.Node) -> str:
    """Return file and line of the user's code that calls an operator; of its library if there is none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not is_library(frame[0])] or frames
    return f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else "no place in the code is known"


def module_path(node: torch.fx.Node) -> str:
    """Return the path of the innermost module that calls an operator, from the user's module on."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = next((one for one in reversed(stack) if one.startswith("model")), "")
    return re.sub(r"@\d+$", "", path).removeprefix("model").removeprefix(".")
