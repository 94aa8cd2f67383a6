"""The decisions of plans that the runtime cannot execute. Imports no torch, for use in launchers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from weft.bundles import parts
from weft.describe.clip_config import CLIP
from weft.describe.decoder import Decoder
from weft.describe.decoder_row import TRAINED
from weft.describe.families import captured
from weft.describe.model import ModelConfig
from weft.describe.plan import GRADIENT_NORM, MICRO_BATCH_NORMS, SCALED, Plan
from weft.describe.t5_config import T5
from weft.errors import Violation
from weft.installed import remedy

# The families, beside those of decoders, that weft does not train.
PLANNED_ONLY = frozenset({CLIP, T5})


@dataclass(frozen=True, kw_only=True)
class NeededPackage:
    """A package without which ranks cannot run a choice of layers, and weft's extra that installs it."""

    choice: str
    package: str
    extra: str


def missing_packages(plan: Plan) -> list[Violation]:
    """Return one line for each package that a plan's choices of layers need and this machine lacks."""
    chosen = {choice.name for choice in plan.layer_choices}
    return [
        Violation(one.choice, f"needs the package {one.package}, which is not installed: {remedy(one.extra)}")
        for one in parts(NeededPackage)
        if one.choice in chosen and find_spec(one.package) is None
    ]


def planned_only(model: ModelConfig) -> list[Violation]:
    """Return one line for a model that weft describes and does not train."""
    trained = model.family not in PLANNED_ONLY if model.decoder is None else model.family in TRAINED
    where = f"model {model.name}"
    if model.family == captured.FAMILY:
        problem = "a file of layers has no code to train; name the function that builds it"
        return [Violation(where, problem, '[model] build = "package.module:function"')]
    if not trained:
        return [Violation(where, f"{model.family} is planned only; weft does not train it yet")]
    reason = None if model.decoder is None else _uncut(model.decoder, model.layers)
    return [] if reason is None else [Violation(where, f"{reason} are planned only")]


def _uncut(decoder: Decoder, layers: int) -> str | None:
    """Return the blocks that the runtime cannot cut from others, or None."""
    if decoder.indexer is not None and len(decoder.indexer.blocks) < layers:
        return "blocks without an indexer of their own, which use the choice of another,"
    if decoder.block_inputs is not None:
        return "blocks that read rows of a table beside the stream"
    if not all(one.key_value_heads for one in decoder.block_sizes):
        return "blocks without keys of their own, which read those of another,"
    if decoder.experts is not None and decoder.experts.beside:
        return "blocks with experts beside a plain feed-forward"
    return None


def unsupported(plan: Plan) -> list[Violation]:
    """Return one line for each decision of a plan that is predicted but not executed yet."""
    falling = any(list(copy.ranks) != sorted(copy.ranks) for stage in plan.stages for copy in stage.replicas)
    missing = (
        (falling, "a replica whose ranks do not rise", "rising ranks"),
        (
            plan.precision in SCALED and plan.method(GRADIENT_NORM) is None,
            f"precision {plan.precision!r} without the method {GRADIENT_NORM}",
            "bf16",
        ),
        (
            plan.precision in SCALED and plan.method(MICRO_BATCH_NORMS) is not None,
            f"the method {MICRO_BATCH_NORMS} in precision {plan.precision!r}, whose losses are scaled,",
            "bf16",
        ),
        (
            plan.sharding != "zero-0" and not plan.has_like_replicas,
            f"{plan.sharding} among replicas with unlike tensor ranks ({plan.degree_words})",
            "zero-0",
        ),
        (plan.stack != "weft", f"a plan of {plan.stack}", "weft"),
        (plan.launch == "captured", "a plan whose layers are captured graphs", "compiled"),
        (bool(plan.blocking), f"blocking {' and '.join(plan.blocking)}", "overlapped"),
    )
    return [
        Violation("plan", f"{text} is not supported by this runtime yet", near)
        for given, text, near in missing
        if given
    ]
