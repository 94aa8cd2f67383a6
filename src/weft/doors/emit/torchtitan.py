"""torchtitan from 0.3 on: a configuration in Python for `torchrun -m torchtitan.train --module ...`.

The module has one function, which builds a `Trainer.Config`; options of the command line override it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.doors.emit.base import Decided, Emitted, header
from weft.doors.emit.torchtitan_keys import decide, degrees, flavor, learning_rate, parts, training
from weft.planning.planned_job import PlannedJob

NAME = "torchtitan"
_MODULE = "weft_torchtitan"
_MODULES = {"embedding": ["tok_embeddings"], "head": ["norm", "lm_head"]}
_IMPORTS = """\
# What nobody chose comes from the environment; without it the program ends with the name.
import os

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer
"""
_RECOMPUTES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def emit(planned: PlannedJob) -> Emitted:
    """Return the module of the plan.

    Raises:
        InputError: when the model is no Llama.
    """
    decided, order, lost = decide(planned)
    command = decided.torchrun(f"-m torchtitan.train --module {_MODULE} --config planned")
    launch = f"PYTHONPATH=. {command}"
    values = {**training(decided), **_unchosen(decided)}
    parallelism: dict[str, Any] = degrees(decided) | order
    if stages := parts(decided, _MODULES):
        parallelism["module_fqns_per_model_part"] = stages
        # Version 0.3 refuses to record the steps of a pipeline.
        values["disable_cuda_graphs"] = True
    text = (
        f"{header(decided, launch, lost)}{_IMPORTS}\n\n"
        "def planned() -> Trainer.Config:\n"
        f"    model_spec = model_registry({flavor(decided)!r})\n"
        "    vocabulary = decoder_vocab_size(model_spec)\n"
        "    return Trainer.Config(\n"
        "        model_spec=model_spec,\n"
        "        loss=ChunkedLossWrapper.Config("
        "loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)),\n"
        '        hf_assets_path=os.environ["TOKENIZER"],\n'
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset=os.environ["DATASET"]),\n'
        f"{_call('training', 'TrainingConfig', values)}"
        f"{_optimizer(decided)}"
        f"{_call('parallelism', 'ParallelismConfig', parallelism)}"
        f"        activation_checkpoint={_RECOMPUTES[decided.layout.recompute]},\n"
        "    )\n"
    )
    return Emitted(file=f"{_MODULE}.py", text=text, launch=launch, losses=lost)


def _call(name: str, called: str, values: Mapping[str, Any]) -> str:
    lines = "".join(f"            {key}={_value(value)},\n" for key, value in values.items())
    return f"        {name}={called}(\n{lines}        ),\n"


def _value(value: Any) -> str:
    """Return a Python literal or expression; the stages of a pipeline take a line each."""
    if isinstance(value, list):
        return "[\n" + "".join(f"                {part!r},\n" for part in value) + "            ]"
    return repr(value)


class _FromEnvironment(str):
    """An expression of Python, which stands in the module as it is."""

    __repr__ = str.__str__


def _asked(kind: str, variable: str) -> _FromEnvironment:
    return _FromEnvironment(f'{kind}(os.environ["{variable}"])')


def _unchosen(decided: Decided) -> dict[str, Any]:
    """Return expressions in place of the training keys that nobody chose."""
    asked = {
        "steps": ("train", "steps", _asked("int", "STEPS")),
        "max_norm": ("optimizer", "clip_norm", _asked("float", "CLIP_NORM")),
    }
    return {name: decided.chosen(*choice) for name, choice in asked.items()}


def _optimizer(decided: Decided) -> str:
    optimizer = decided.run.optimizer
    values: dict[str, Any] = {
        "lr": decided.chosen("optimizer", "learning_rate", _asked("float", "LEARNING_RATE"))
    }
    values |= {
        key: value
        for key, value in (("betas", optimizer.betas), ("weight_decay", optimizer.weight_decay))
        if decided.run.chose("optimizer", key)
    }
    group = {
        "pattern": ".*",
        "optimizer_name": "Adam" if optimizer.name == "adam" else "AdamW",
        "optimizer_kwargs": values,
    }
    words = ", ".join(f"{key}={value!r}" for key, value in group.items())
    rate = ", ".join(f"{key}={value!r}" for key, value in learning_rate(decided).items())
    return (
        "        optimizer=OptimizersContainer.Config(\n"
        f"            param_groups=[ParamGroupConfig({words})]\n        ),\n"
        f"        lr_scheduler=LRSchedulersContainer.Config({rate}),\n"
    )
