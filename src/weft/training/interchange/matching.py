"""The match between a folder's tensors and a model's parameters, with all differences in one error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation, nearest
from weft.run.stage.families import stage_family
from weft.training.checkpoint.tensor_folders import Shape, TensorFolder
from weft.training.interchange.expert_tensors import JoinedExperts
from weft.training.interchange.hugging_face_families import (
    HuggingFaceFamily,
    family_of_files,
    hugging_face_family,
)

_UNTIED = "tie_word_embeddings = false"


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors in a folder: `shapes` by the model's names, which `names` maps to the folder's."""

    folder: TensorFolder
    names: Mapping[str, str]
    shapes: Mapping[str, Shape]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by the model's name, in the stored precision.

        Raises:
            InputError: if its bytes are broken, or it is quantised: such a tensor needs its scales. A single
                int64 is accepted: the count of batches of a batch norm.
        """
        value = self.folder.read(self.names[name])
        counts = value.dtype == torch.int64 and value.dim() == 0
        if not counts and (not value.is_floating_point() or value.itemsize < 2):
            kind = str(value.dtype).removeprefix("torch.")
            problem = f"{self.names[name]} is stored as {kind}; quantised weights are not read"
            raise InputError(Violation(str(self.folder.path), problem, "bfloat16"))
        shape = self.shapes[name]
        return value if value.shape == shape else value[: shape[0]]


def model_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all tensors of a model by the names of its stages, without a tied head.

    Raises:
        InputError: for a family without folders of `transformers`.
    """
    hugging_face_family(config)
    with torch.device("meta"):
        model = stage_family(config.family)(config, range(config.layers + 2))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def match_weights(folder: TensorFolder, config: ModelConfig, *, others: bool = False) -> Weights:
    """Find a model's tensors in a folder.

    Names may lack the prefix of the model with a head, or all may have a further prefix.

    Args:
        others: True if the folder may hold further tensors, such as an optimizer's states.

    Raises:
        InputError: one line for every missing or superfluous tensor, for every wrong shape, and for a tied
            head that differs from its embedding.
    """
    family = family_of_files(config)
    shapes = model_shapes(config)
    if family.experts is not None:
        folder = JoinedExperts(folder, family.experts)
    names = _best_names(folder.shapes, shapes, family)
    tied = family.tied if config.tied_embeddings else {}
    where = str(folder.path)
    problems = [
        Violation(where, f"{name} is missing", nearest(name, folder.shapes))
        for name in shapes
        if name not in names
    ]
    problems += [
        Violation(where, f"{names[name]} has the shape {_text(given)}, the model's has {_text(shape)}")
        for name, shape in shapes.items()
        if name in names
        and (given := folder.shapes[names[name]]) != shape
        and not (name == family.positions and given[1:] == shape[1:] and given[0] > shape[0])
    ]
    if not others:
        known = {*names.values(), *tied}
        problems += [
            Violation(where, f"{name} is not a tensor of this model")
            for name in folder.shapes
            if name not in known and not re.fullmatch(family.superfluous, name)
        ]
    if not problems:
        problems = [
            Violation(where, f"{copy} differs from {names[kept]}, but the model ties them", _UNTIED)
            for copy, kept in tied.items()
            if copy in folder.shapes and not torch.equal(folder.read(copy), folder.read(names[kept]))
        ]
    if problems:
        raise InputError(problems)
    return Weights(folder, names, shapes)


def _best_names(
    given: Mapping[str, Shape], wanted: Mapping[str, Shape], family: HuggingFaceFamily
) -> dict[str, str]:
    """Return the folder's names by the model's names, for the reading of names with the most matches."""
    outer = {name.removesuffix(family.embedding) for name in given if name.endswith(f".{family.embedding}")}
    readings = [
        {name: name for name in wanted},
        {name: family.stored(name) for name in wanted},
        {name: family.stored(name).removeprefix(family.prefix) for name in wanted},
        *({name: more + name for name in wanted} for more in sorted(outer)),
    ]
    found = [{name: read for name, read in reading.items() if read in given} for reading in readings]
    return max(found, key=len)


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "scalar"
