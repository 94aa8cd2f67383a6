"""The tensors of experts in files: one for each expert, where a stage has one for all of them.

A stage has `experts.gate_up_proj` (experts, 2 columns, hidden) and `experts.down_proj` (experts, hidden,
columns). Files have `experts.0.gate_proj.weight` and so on, or other names of the three products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from weft.errors import InputError, Violation
from weft.training.checkpoint.tensor_folders import Shape, TensorFolder

_TOGETHER, _LAST = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of an expert's three products in files."""

    gate: str = "gate_proj"
    columns: str = "up_proj"
    last: str = "down_proj"

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stored names and tensors of a stage's tensor, one for each expert's product."""
        for end, products in ((_TOGETHER, (self.gate, self.columns)), (_LAST, (self.last,))):
            if name.endswith(end):
                before = name.removesuffix(end)
                for expert, own in enumerate(tensor):
                    for product, part in zip(products, own.chunk(len(products)), strict=True):
                        yield f"{before}.experts.{expert}.{product}.weight", part.clone()
                return
        yield name, tensor


class JoinedExperts:
    """A folder whose experts' tensors are joined; all other tensors keep their names.

    Raises:
        InputError: with one line for each missing tensor of an expert, or for a product of unlike shapes.
    """

    def __init__(self, folder: TensorFolder, names: ExpertNames) -> None:
        self.path, self._folder = folder.path, folder
        separate = re.compile(rf"(.+\.experts)\.(\d+)\.({names.gate}|{names.columns}|{names.last})\.weight")
        found: dict[str, set[str]] = {}
        for name in folder.shapes:
            if match := separate.fullmatch(name):
                found.setdefault(match[1], set()).add(match[2])
        self._sources: dict[str, list[list[str]]] = {}
        for module, experts in found.items():
            # As many experts as there are numbers, however large one of these is.
            for end, products in ((_TOGETHER, (names.gate, names.columns)), (_LAST, (names.last,))):
                self._sources[module.removesuffix(".experts") + end] = [
                    [f"{module}.{expert}.{product}.weight" for product in products]
                    for expert in range(len(experts))
                ]
        self._require_alike()
        joined = {name for each in self._sources.values() for own in each for name in own}
        self.shapes: Mapping[str, Shape] = {
            **{name: shape for name, shape in folder.shapes.items() if name not in joined},
            **{name: self._joined_shape(sources) for name, sources in self._sources.items()},
        }

    def read(self, name: str) -> torch.Tensor:
        sources = self._sources.get(name)
        if sources is None:
            return self._folder.read(name)
        return torch.cat([self._folder.read(one) for each in sources for one in each]).view(self.shapes[name])

    def _joined_shape(self, sources: list[list[str]]) -> Shape:
        rows, width = self._folder.shapes[sources[0][0]]
        return (len(sources), len(sources[0]) * rows, width)

    def _require_alike(self) -> None:
        where, problems = str(self.path), []
        for sources in self._sources.values():
            names = [name for each in sources for name in each]
            missing = [name for name in names if name not in self._folder.shapes]
            problems += [Violation(where, f"{name} is missing") for name in missing]
            shapes = {} if missing else {self._folder.shapes[name]: name for name in names}
            if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
                problems.append(Violation(where, f"{names[0]} and others of its experts have unlike shapes"))
        if problems:
            raise InputError(problems)
