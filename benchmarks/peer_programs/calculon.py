"""Calculon's step and peak of plans (Isaev et al., SC 2023): a formula for GPT blocks on equal devices.

Each plan becomes the three files of its command `llm`. Plans that it cannot say have a reason. Its answer
names the parts of a plan that it replaces by others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.layout_text import counts_text, decision_text
from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW
from weft.describe.plan import GRADIENT_NORM, Plan
from weft.errors import InputError, RunError
from weft.moves.layout_of_plan import layout_of

from .calculon_files import (
    DATA_TYPES,
    PUBLISHED,
    Shares,
    Stream,
    Tiers,
    application,
    execution,
    system,
    tiers_of,
)
from .program import PeerProgram

_COMMAND = "bin/calculon"
_BATCH = Path(__file__).resolve().with_name("calculon_batch.py")
# The parts of its step by our words; offloads, which weft does not have, are 0.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("fw_time", "bw_time"),
    "recompute": ("recompute_time", "recomm_exposed_time"),
    "tensor ranks": ("tp_comm_exposed_time",),
    "messages": ("pp_comm_exposed_time",),
    "gradients": ("dp_comm_exposed_time",),
    "bubble": ("bubble_time",),
    "optimizer": ("optim_step_time",),
    "offload": ("fw_offload_exposed_time", "bw_offload_exposed_time"),
}
_STEP, _PEAK = "total_time", "proc_mem_tier1_cap_req"
# Decisions that it can be told, or that have a reason of their own where it cannot.
_KNOWN = {
    *("tp", "sharding", "recompute", "recompute_per_stage", "blocking"),
    *("layers_per_stage", "micro_batches_per_replica", "rank_order"),
}
# Of the parts' sum; it prints all of their digits.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan of a model on a cluster; `stream` None: as weft's own runtime divides the tokens."""

    model: ModelConfig
    graph: LayerGraph
    cluster: Cluster
    plan: Plan
    stream: Stream | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Calculon's answer about one plan.

    Attributes:
        step_s: seconds of a step, None where it cannot say the plan.
        peak_bytes: of the fullest device.
        breakdown: seconds of the step by cause; they add up to the step.
        approximated: what of the plan it does not know, and what it takes in its place.
        reason: why it cannot say the plan, empty where it can.
    """

    step_s: float | None = None
    peak_bytes: int | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    approximated: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculon:
    """Calculon's program as a judge of plans.

    Attributes:
        program: its clone; another folder is refused.
        shares: which shares of the data sheet's peaks are reached.
    """

    name: ClassVar[str] = "calculon"
    always: ClassVar[tuple[str, ...]] = (
        "neither embeddings nor logits",
        "attention's scores are stored",
        "shares of peaks and factors of links as published for the A100",
    )
    program: PeerProgram
    shares: Shares = PUBLISHED

    def __post_init__(self) -> None:
        self.program.require(_COMMAND)

    def say(self, questions: Sequence[Question]) -> tuple[Said, ...]:
        """Ask for a step and a peak of each plan; a plan without them has a reason.

        Raises:
            RunError: when the program fails, takes too long, or answers what is no answer.
        """
        prepared = [_prepared(question) for question in questions]
        asked = [one for one in prepared if isinstance(one, _Prepared)]
        with TemporaryDirectory(prefix="weft-calculon-") as name:
            answers = iter(self._answers(asked, Path(name)) if asked else ())
            return tuple(
                next(answers) if isinstance(one, _Prepared) else Said(reason=one) for one in prepared
            )

    def _answers(self, asked: Sequence[_Prepared], folder: Path) -> list[Said]:
        for number, one in enumerate(asked):
            for part, record in one.files(self.shares).items():
                (folder / f"{number}.{part}.json").write_text(json.dumps(record), encoding="utf-8")
        self.program.run(
            [str(_BATCH), str(self.program.root.resolve()), str(folder), str(len(asked))], folder
        )
        return [_said(one, folder, number) for number, one in enumerate(asked)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A plan that Calculon can say."""

    question: Question
    layout: Layout
    group: NodeGroup
    stream: Stream

    @property
    def tiers(self) -> Tiers:
        return tiers_of(self.layout, self.group.devices)

    def files(self, shares: Shares) -> dict[str, dict[str, Any]]:
        plan = self.question.plan
        return {
            "application": application(self.question.model, plan.sequence),
            "execution": execution(
                self.layout,
                global_batch=plan.global_batch,
                precision=plan.precision,
                stream=self.stream,
                tiers=self.tiers,
            ),
            "system": system(self.question.cluster, self.group, plan.precision, shares),
        }


def _prepared(question: Question) -> _Prepared | str:
    """Prepare a question for Calculon, or return the reason why it cannot answer."""
    plan, cluster = question.plan, question.cluster
    if question.model.family != "gpt":
        return f"it knows GPT's blocks only, not {question.model.family}'s"
    if plan.precision not in DATA_TYPES:
        return f"it has no numbers of {plan.precision}"
    groups = [
        group
        for place, group in enumerate(cluster.groups)
        if any(cluster.group_index_of(rank) == place for rank in range(plan.ranks))
    ]
    kinds = list(dict.fromkeys(group.device.name for group in groups))
    if len(groups) > 1:
        unlike = f"not {' with '.join(kinds)}" if len(kinds) > 1 else f"not unlike nodes of {kinds[0]}"
        return f"it knows equal devices on equal nodes only, {unlike}"
    if len(set(groups[0].speeds)) > 1:
        return "it knows equally fast devices only"
    try:
        layout = layout_of(plan)
    except InputError as error:
        return str(error.violations[0])
    reason = next(_refusals(question, layout), None)
    if reason is not None:
        return reason
    divides = plan.sequence % layout.tp == 0
    stream = question.stream or ("kept" if divides else "whole")
    return _Prepared(question=question, layout=layout, group=groups[0], stream=stream)


def _refusals(question: Question, layout: Layout) -> Iterator[str]:
    """Yield the parts of a layout that Calculon cannot say."""
    for name in layout.unusual:
        if name not in _KNOWN:
            yield f"it does not have {decision_text(name, getattr(layout, name))}"
    if layout.sharding in ("zero-2", "zero-3"):
        yield f"it shares out optimizer states only, not {layout.sharding}"
    if layout.schedule not in ("1f1b", "depth-first"):
        yield f"it knows 1f1b and interleaved 1f1b (depth-first), not {layout.schedule}"
    if layout.recompute_per_stage is not None:
        yield f"its stages recompute alike, not {layout.recompute_text}"
    if layout.micro_batches_per_replica is not None:
        yield f"its replicas have equal shares, not {counts_text(layout.micro_batches_per_replica)}"
    if layout.rank_order is not None:
        yield "its ranks are devices in their order"
    blocks = [
        sum(question.graph.layers[layer].kind == "block" for layer in stage.layers)
        for stage in question.plan.stages
    ]
    if blocks != _dealt(sum(blocks), len(blocks), layout.loops):
        yield f"it deals blocks out equally, not {counts_text(tuple(blocks))}"


def _dealt(blocks: int, stages: int, loops: int) -> list[int]:
    """Return the blocks of each stage as Calculon deals them: the first stages take the remainder."""
    each, left = divmod(blocks, stages)
    return [each + (loops == 1 and stage < left) for stage in range(stages)]


def _approximated(one: _Prepared) -> Iterator[str]:
    """Yield the parts of a plan that Calculon replaces by others."""
    layout, devices, tiers = one.layout, one.group.devices, one.tiers
    if layout.pp > 1 and "messages" not in layout.blocking:
        yield "messages are waited for"
    if tiers.pipeline and layout.pp > 1 and layout.ranks > devices:
        neighbours = layout.tp * layout.dp
        if neighbours < devices:
            yield "all messages go between nodes"
    if tiers.data and layout.dp > 1 and layout.tp < devices:
        yield "replicas add gradients up between nodes only"
    if tiers.tensor and layout.tp > 1:
        yield "tensor ranks meet between nodes only"
    if layout.recompute == "selective" and one.question.stream is None:
        yield "selective makes attention's scores again, and nothing else"
    if one.question.plan.method(GRADIENT_NORM):
        yield "no norm of the gradient"
    if one.question.plan.optimizer != ADAMW:
        yield "states and steps of Adam"


def _said(one: _Prepared, folder: Path, number: int) -> Said:
    """Read an answer.

    Raises:
        RunError: when there is none that can be read.
    """
    refused = folder / f"{number}.error.txt"
    if refused.is_file():
        words = " ".join(refused.read_text(encoding="utf-8").split())
        return Said(reason=f"it says: {words.removeprefix('ERROR: ')}")
    try:
        record = json.loads((folder / f"{number}.stats.json").read_text(encoding="utf-8"))
        step_s, peak_bytes = float(record[_STEP]), float(record[_PEAK])
        parts = {word: sum(float(record[key]) for key in keys) for word, keys in _PARTS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"calculon: its answer cannot be read: {type(error).__name__}: {error}") from None
    if not (0.0 < step_s < math.inf and 0.0 < peak_bytes < math.inf):
        raise RunError(f"calculon: its answer cannot be right: {step_s:g} s and {peak_bytes:g} bytes")
    if abs(sum(parts.values()) - step_s) > _ROUNDING * step_s:
        raise RunError(
            f"calculon: the parts of its answer add up to {sum(parts.values()):g} s, not {step_s:g} s"
        )
    return Said(
        step_s=step_s,
        peak_bytes=round(peak_bytes),
        breakdown={word: seconds for word, seconds in parts.items() if seconds},
        approximated=tuple(_approximated(one)),
    )
