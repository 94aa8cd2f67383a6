"""torchtitan up to 0.2: a job's TOML for `run_train.sh` and `torchrun -m torchtitan.train`.

The keys come from `torchtitan/config/job_config.py`. Later versions have configurations in Python.
"""

from __future__ import annotations

from weft.describe.toml_table import table_text, value_text
from weft.doors.emit.base import Decided, Emitted, header
from weft.doors.emit.torchtitan_keys import (
    STACK,
    UNCHOSEN,
    Table,
    decide,
    degrees,
    flavor,
    learning_rate,
    parts,
    training,
)
from weft.planning.planned_job import PlannedJob

NAME = "torchtitan-toml"
_MODULES = {"embedding": ["tok_embeddings"], "head": ["norm", "output"]}


def emit(planned: PlannedJob) -> Emitted:
    """Return the TOML of the plan.

    Raises:
        InputError: when the model is no Llama.
    """
    decided, order, lost = decide(planned)
    file = f"{STACK}.toml"
    launch = decided.torchrun(f"-m torchtitan.train --job.config_file {file}")
    recompute: Table = {"mode": decided.layout.recompute}
    if decided.layout.recompute == "selective":
        recompute["selective_ac_option"] = "op"
    tables = [
        table_text("[model]", {"name": "llama3", "flavor": flavor(decided), "hf_assets_path": UNCHOSEN}),
        table_text("[training]", {"dataset": UNCHOSEN, **training(decided)}),
        _optimizer(decided),
        table_text("[parallelism]", degrees(decided) | order) + _parts(decided),
        table_text("[activation_checkpoint]", recompute),
    ]
    text = header(decided, launch, lost) + "\n" + "\n".join(tables)
    return Emitted(file=file, text=text, launch=launch, losses=lost)


def _optimizer(decided: Decided) -> str:
    optimizer = decided.run.optimizer
    name = "Adam" if optimizer.name == "adam" else "AdamW"
    values: Table = {"name": name, "lr": decided.chosen("optimizer", "learning_rate", UNCHOSEN)}
    if optimizer.betas is not None:
        values["beta1"], values["beta2"] = optimizer.betas
    if decided.run.chose("optimizer", "weight_decay"):
        values["weight_decay"] = optimizer.weight_decay
    table, rate = table_text("[optimizer]", values), learning_rate(decided)
    return table + "\n" + table_text("[lr_scheduler]", rate) if rate else table


def _parts(decided: Decided) -> str:
    stages = parts(decided, _MODULES)
    lines = ",\n".join(f"  {value_text(names)}" for names in stages)
    return f"module_fqns_per_model_part = [\n{lines},\n]\n" if stages else ""
