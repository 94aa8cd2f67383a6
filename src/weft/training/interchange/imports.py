"""Weights from other programs: initial values of a run, and folders from other trainers' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.models import CONFIG_FILE, PRESETS, resolve_model
from weft.run.parallel.tensor_stage import own_share
from weft.run.stage.stage_module import StageModule
from weft.training.checkpoint.tensor_folders import SafetensorsFolder, Shape, TensorFolder
from weft.training.interchange.dcp import METADATA, DcpFolder
from weft.training.interchange.hugging_face import WrittenFolder, require_same_function, write_folder
from weft.training.interchange.matching import Weights, match_weights


def read_initial_weights(path: Path, config: ModelConfig, stages: Mapping[int, nn.Module]) -> None:
    """Fill the parameters of a rank's stages from a folder of safetensors files.

    Only the stages' own tensors are read, one by one, and cast to the stages' precision. Weights that methods
    pack are packed at once. Layers that methods add to a stage keep their initial values.

    Raises:
        InputError: as in `initial_weights`.
    """
    weights = initial_weights(path, config)
    with torch.no_grad():
        for stage in stages.values():
            values = stage.state_dict()
            for name in list(values):
                # Nothing else holds a weight that is packed.
                tensor = values.pop(name)
                if not isinstance(stage, StageModule) or stage.owner(name) is None:
                    tensor.copy_(own_share(stage, name, weights.read(name)))
                if isinstance(stage, StageModule):
                    stage.pack(name)


def initial_weights(path: Path, config: ModelConfig) -> Weights:
    """Match a folder of safetensors files with a model by the headers; a later `read` reads values.

    Args:
        path: the folder, or its configuration file.

    Raises:
        InputError: one line for every difference between the folder and the model.
    """
    file = _configuration(path)
    require_same_function(file, config)
    return match_weights(SafetensorsFolder(file.parent), config)


def import_weights(source: Path, out: Path, model: str) -> tuple[WrittenFolder, int]:
    """Convert another trainer's checkpoint to a folder for the start of a run and for `transformers`.

    Args:
        source: a folder of torch's distributed checkpointing or of safetensors files, or the parent of such
            folders step-N (the newest counts). Names are those of `transformers`, or of torchtitan's Llama.
        model: the model of the weights: a preset, a folder with a `config.json`, or such a file.

    Returns:
        The written folder, and the number of further entries of the checkpoint.

    Raises:
        InputError: if the source or its metadata is refused, its tensors do not fit, or `out` exists.
    """
    config = resolve_model(model)
    if model not in PRESETS:
        require_same_function(_configuration(Path(model)), config)
    folder = _open(source)
    named: TensorFolder = folder
    if config.family == "llama" and TOKEN_TABLE in folder.shapes:
        named = TorchtitanLlama(folder, config)
    weights = match_weights(named, config, others=True)
    written = write_folder(out, config, weights)
    others = folder.others if isinstance(folder, DcpFolder) else 0
    return written, len(folder.shapes) - written.tensors + others


def _configuration(path: Path) -> Path:
    return path / CONFIG_FILE if path.is_dir() else path


def _open(source: Path) -> TensorFolder:
    steps = {
        int(match[1]): path
        for path in (source.iterdir() if source.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
    }
    if steps and not (source / METADATA).exists():
        source = steps[max(steps)]
    return DcpFolder(source) if (source / METADATA).exists() else SafetensorsFolder(source)


TOKEN_TABLE = "tok_embeddings.weight"
_OUTSIDE = {
    TOKEN_TABLE: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "output.weight": "lm_head.weight",
}
_QUERIES, _KEYS = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": _QUERIES,
    "attention.wk.weight": _KEYS,
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class TorchtitanLlama:
    """The tensors of a torchtitan Llama under the names of `transformers`; other entries keep their names."""

    def __init__(self, folder: TensorFolder, config: ModelConfig) -> None:
        self.path = folder.path
        self._folder = folder
        self._names = {_renamed(name): name for name in folder.shapes}
        self._heads = {_QUERIES: config.heads, _KEYS: config.key_value_heads}
        self.shapes: Mapping[str, Shape] = {
            name: folder.shapes[stored] for name, stored in self._names.items()
        }

    def read(self, name: str) -> torch.Tensor:
        value = self._folder.read(self._names[name])
        heads = next((heads for end, heads in self._heads.items() if name.endswith(end)), 0)
        return halves_from_neighbours(value, heads) if heads else value


def halves_from_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder a projection (heads * head size, hidden) with neighbour pairs to pairs half a head apart."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _renamed(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        # Newer versions keep the three projections in a separate module.
        part = match[2].replace("attention.qkv_linear.", "attention.")
        return f"model.layers.{match[1]}.{_IN_LAYER[part]}" if part in _IN_LAYER else name
    return _OUTSIDE.get(name, name)
