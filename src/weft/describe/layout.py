"""`Layout`: the decisions that planners search, and `PartialLayout`: the decisions that are already made.

Fields of `PartialLayout` have the names and the meanings of the layout's fields. It is the `[plan]` table of
a run file and the options of `weft plan`. Files of other frameworks are read as one, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Self, TypedDict, Unpack

from pydantic import BeforeValidator, Field, model_validator

from weft.describe.amount import Shape
from weft.describe.layout_text import counts_text, methods_text, order_text, recomputes_text
from weft.describe.loss_choice import ANY_LOSS, WHOLE, AskedLoss, Loss
from weft.describe.one_line import one_line
from weft.describe.plan import RECOMPUTES, Blocking, Choice, Recompute, Sharding, said_options, shared_out
from weft.describe.replica_grid import ReplicaGrid
from weft.describe.toml_table import TOML_ARRAY, Count, TomlTable, Word, value_text
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

# The default synchronisation of replicas.
DENSE = "dense"
# Fields of every record of a layout, in their order, and fields with only unusual values in records.
_RECORDED = (
    "pp",
    "dp",
    "tp",
    "cp",
    "loops",
    "micro_batch_size",
    "schedule",
    "options",
    "sharding",
    "island",
    "recompute",
    "recompute_per_stage",
)
_SAID_WHERE_UNUSUAL = ("ep", "splits", "blocking", "loss", "loss_chunk_tokens", "sync")
# Decisions that a layout's plan contains unchanged, under the same names.
KEPT_IN_PLANS = ("micro_batch_size", "sharding", "island", "blocking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees and choices of one layout: planners search them, and a Plan is built from them.

    Degrees of `AXES` count devices of one pipeline, replicas, and ranks inside a replica. These divide
    experts and samples, a sample's tokens, or every layer. `loops` are the stages of each device, `options`
    the schedule's options. See `weft.describe.plan.Plan` for `sharding`, `island` and `blocking`. `recompute`
    holds for all stages, or is the heaviest of `recompute_per_stage` (see `recomputing`). `layers_per_stage`
    cuts the chain of layers; None balances the stages. `rank_order` has the cluster's device for each rank of
    the mesh, rising in each replica of a stage; None: the device with the rank's number.
    `micro_batches_per_replica` has a count for each of the `dp` pipelines; None: equal shares. `splits` has
    each stage's number of equal parts of a micro-batch, which it runs one by one; empty: no splits. `loss` is
    the kernel of the head and its cross entropy, with `loss_chunk_tokens` tokens in each chunk; None: by the
    sizes of the head. `methods` are chosen beside the job's, or in place of those with the same names.
    `sync_options` are options of `sync` beside the job's.
    """

    pp: int
    dp: int
    loops: int
    micro_batch_size: int
    schedule: str
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    sync: str = DENSE
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sharding: Sharding = "zero-0"
    island: int | None = None
    recompute: Recompute = "none"
    recompute_per_stage: tuple[Recompute, ...] | None = None
    splits: tuple[int, ...] = ()
    blocking: tuple[Blocking, ...] = ()
    loss: Loss = WHOLE
    loss_chunk_tokens: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    rank_order: tuple[int, ...] | None = None
    micro_batches_per_replica: tuple[int, ...] | None = None
    methods: tuple[Choice, ...] = ()
    sync_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    def methods_beside(self, asked: Sequence[Choice]) -> tuple[Choice, ...]:
        """Return the methods that a job asks for and those of this layout."""
        if not self.methods:
            return (*asked,)
        own = {choice.name for choice in self.methods}
        return (*(choice for choice in asked if choice.name not in own), *self.methods)

    @property
    def regular(self) -> Layout:
        """A copy with balanced stages, one recompute word, no splits, ranks in order and equal shares.
        Degrees and all other choices are the same."""
        return replace(
            self,
            recompute_per_stage=None,
            splits=(),
            layers_per_stage=None,
            rank_order=None,
            micro_batches_per_replica=None,
        )

    def record(self) -> dict[str, Any]:
        """Return the decisions as plain values for JSON output.

        Cuts, rank orders and shares by hand are only in the layout's text. `recompute_per_stage` is None if
        all stages recompute alike. Synchronisation and blocking are present only with unusual values.
        """
        record = {name: getattr(self, name) for name in _RECORDED}
        said = [name for name in _SAID_WHERE_UNUSUAL if name in self.unusual]
        methods = {"methods": [one.model_dump() for one in self.methods]} if self.methods else {}
        sync_options = {"sync_options": dict(self.sync_options)} if self.sync_options else {}
        said_values = {name: getattr(self, name) for name in said}
        return record | {"options": dict(self.options)} | said_values | sync_options | methods

    @property
    def grid(self) -> ReplicaGrid:
        """The degrees inside each replica of a stage."""
        return ReplicaGrid(self.tp, self.cp, self.ep)

    @property
    def width(self) -> int:
        """Ranks of one replica of a stage."""
        return self.grid.ranks

    def shape(self, sequence: int) -> Shape:
        """Return the shape of one rank's part of a micro-batch with `sequence` tokens per sample."""
        return Shape(self.micro_batch_size // self.ep, sequence, *self.grid)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.width

    @property
    def stages(self) -> int:
        return self.pp * self.loops

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """The recomputation of each stage."""
        return self.recompute_per_stage or (self.recompute,) * self.stages

    @property
    def recompute_text(self) -> str:
        """The recomputation of stages, in words."""
        each = self.recompute_per_stage
        return self.recompute if each is None else recomputes_text(each)

    @property
    def unusual(self) -> tuple[str, ...]:
        """The names of decisions that differ from the defaults."""
        return tuple(name for name, usual in USUAL.items() if getattr(self, name) != usual)

    def recomputing(self, recompute: Recompute | Sequence[Recompute]) -> Layout:
        """Return the same layout with one recompute word for all stages, or one for each."""
        words = (recompute,) if isinstance(recompute, str) else tuple(recompute)
        alike = isinstance(recompute, str) or (len(set(words)) == 1 and len(words) == self.stages)
        heaviest = max(words, key=RECOMPUTES.index)
        asked = (heaviest, None if alike else words)
        if asked == (self.recompute, self.recompute_per_stage):
            return self
        return replace(self, recompute=heaviest, recompute_per_stage=asked[1])

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        text = f"pp {self.pp} x dp {self.dp}"
        if self.ep > 1:
            text += f" x ep {self.ep}"
        if self.cp > 1:
            text += f" x cp {self.cp}"
        if self.tp > 1:
            text += f" x tp {self.tp}"
        text += f", {self.schedule}"
        if said := said_options(self.options):
            text += f" ({', '.join(said)})"
        if self.loops > 1:
            text += f", {self.loops} loops"
        text += f", micro-batch size {self.micro_batch_size}"
        if self.splits:
            text += f", splits {counts_text(self.splits)}"
        if self.sharding != "zero-0" or self.island is not None:
            text += f", {shared_out(self)}"
        if self.recompute_per_stage is not None or self.recompute != "none":
            text += f", recompute {self.recompute_text}"
        if self.sync != DENSE:
            text += f", sync {methods_text([Choice(name=self.sync, options=self.sync_options)])}"
        if self.methods:
            text += f", {methods_text(self.methods)}"
        if self.blocking:
            text += f", blocking {' and '.join(self.blocking)}"
        if self.loss != WHOLE:
            text += f", loss {self.loss}"
        if self.loss_chunk_tokens is not None:
            text += f" by {self.loss_chunk_tokens} tokens"
        if self.layers_per_stage is not None:
            text += f", layers {counts_text(self.layers_per_stage)}"
        if self.micro_batches_per_replica is not None:
            text += f", shares {counts_text(self.micro_batches_per_replica)}"
        if self.rank_order is not None:
            text += f", devices {order_text(self.rank_order)}"
        return text


# Defaults of a layout's decisions.
USUAL: Mapping[str, object] = {one.name: one.default for one in fields(Layout) if one.default is not MISSING}


def rank_order_of(devices: Sequence[int]) -> tuple[int, ...] | None:
    """Return the `rank_order` of devices in the order of their ranks; None if each rank is its number."""
    return None if list(devices) == list(range(len(devices))) else tuple(devices)


def _place(name: str) -> int:
    return _RECORDED.index(name) if name in _RECORDED else len(_RECORDED)


def _require_recompute(given: object) -> object:
    """Check one recompute word for all stages, or a list with a word for each."""
    words = given if isinstance(given, list | tuple) else [given]
    allowed = f"must be {', '.join(map(repr, RECOMPUTES[:-1]))} or {RECOMPUTES[-1]!r}"
    for stage, word in enumerate(words):
        if word not in RECOMPUTES:
            of = f" for stage {stage}" if words is given else ""
            near = nearest(word, RECOMPUTES) if isinstance(word, str) else ""
            raise InputError(Violation("", f"{shown(word)}{of}: {allowed}", near))
    if not words:
        raise InputError(Violation("", "an empty list; one word for all stages, or one for each", "none"))
    return tuple(words) if words is given else given


def _require_once(given: object) -> object:
    """Check one word or a list of different words, and sort them; their order has no meaning."""
    words = given if isinstance(given, list | tuple) else (given,)
    if given is None or not all(isinstance(word, str) for word in words):
        return given
    if len(set(words)) < len(words):
        raise InputError(Violation("", f"{', '.join(words)}: each can be named once"))
    return tuple(sorted(words))


class PartialLayout(TomlTable):
    """Decisions of a layout; None means an open decision.

    `recompute` is one word for all stages, or a word for each.
    """

    schedule: Word | None = Field(default=None, description="the order of micro-batches")
    loops: Count | None = Field(default=None, description="the stages per device")
    pp: Count | None = Field(default=None, description="the pipeline-parallel degree")
    dp: Count | None = Field(default=None, description="the data-parallel degree")
    tp: Count | None = Field(default=None, description="the tensor-parallel degree")
    cp: Count | None = Field(
        default=None,
        description="the context-parallel degree: how many ranks divide the tokens of a sample",
    )
    ep: Count | None = Field(
        default=None,
        description="the expert-parallel degree: how many ranks divide the experts of a mixture, and the "
        "samples of a micro-batch",
    )
    micro_batch_size: Count | None = Field(default=None, description="the samples per micro-batch")
    splits: Annotated[tuple[Count, ...] | None, TOML_ARRAY] = Field(
        default=None,
        description="for each stage, in how many equal micro-batches of its own it runs one, such as 1,2,1,1",
    )
    sharding: Sharding | None = Field(
        default=None,
        description="what replicas share out: zero-0 nothing, zero-1 optimizer states, zero-2 gradients too, "
        "zero-3 weights too",
    )
    island: Count | None = Field(
        default=None,
        description="how many replicas share it out among themselves, such as those of a node",
    )
    recompute: Annotated[Recompute | tuple[Recompute, ...] | None, BeforeValidator(_require_recompute)] = (
        Field(
            default=None,
            description="whether backward passes run layers forward again, to keep less: none, selective "
            "(without products), or full; or say it of each stage, such as full,none",
        )
    )
    blocking: Annotated[tuple[Blocking, ...] | None, BeforeValidator(_require_once)] = Field(
        default=None,
        description="which communication is waited for instead of running beside computations, as other "
        "programs ship it: gathers, messages, reductions, or several, such as messages,reductions",
    )
    loss: AskedLoss | None = Field(
        default=None,
        description="how the head makes logits and their cross entropy: whole, all logits at once; chunked, "
        "those of some tokens at a time; fused, by Liger Kernel on a GPU; or auto: whole or chunked, "
        "whichever is predicted to be better. Left out, it is whole where memory suffices",
    )
    loss_chunk_tokens: Count | None = Field(
        default=None,
        description="the tokens of a chunk of a chunked loss; left out, half the size of hidden states, or "
        "256 to 512 in narrow models",
    )

    @classmethod
    def of(cls, layout: Layout) -> PartialLayout:
        """Return all of a layout's decisions that this class has."""
        said = {name: getattr(layout, name) for name in PartialLayout.model_fields}
        return PartialLayout(**said | {"recompute": layout.recompute_per_stage or layout.recompute})

    @property
    def given(self) -> dict[str, Any]:
        """The made decisions by name."""
        values = {name: getattr(self, name) for name in PartialLayout.model_fields}
        opened = ("loss", "loss_chunk_tokens") if self.loss == ANY_LOSS else ()
        return {name: value for name, value in values.items() if value is not None and name not in opened}

    def besides(self, names: Collection[str]) -> dict[str, Any]:
        """Return the made decisions except these names."""
        return {name: value for name, value in self.given.items() if name not in names}

    def replaced(self, **decisions: Unpack[Pins]) -> Self:
        """Return a copy with these decisions replaced; None makes a decision open."""
        return self.model_copy(update=decisions)

    def record(self) -> dict[str, Any]:
        """Return all decisions as plain values in a layout's order; None is an open decision."""
        return {name: getattr(self, name) for name in sorted(PartialLayout.model_fields, key=_place)}

    @property
    def width(self) -> int:
        """Ranks of one replica of a stage; open degrees count as 1."""
        return (self.tp or 1) * (self.cp or 1) * (self.ep or 1)

    @property
    def replica_ranks(self) -> int:
        """Ranks of one replica of the whole model; open degrees count as 1."""
        return (self.pp or 1) * self.width

    def complete(self, layout: Layout) -> Layout:
        """Return the layout with these decisions replaced."""
        given = self.given
        recompute = given.pop("recompute", None)
        completed = replace(layout, **given)
        return completed if recompute is None else completed.recomputing(recompute)

    def admit(self, layout: Layout) -> bool:
        """Return True if a layout has all these decisions."""
        return self.complete(layout) == layout

    @model_validator(mode="after")
    def _a_loss_in_chunks(self) -> PartialLayout:
        if self.loss_chunk_tokens is not None and self.loss not in ("chunked", ANY_LOSS):
            problem = f"{self.loss_chunk_tokens}; only a chunked loss has chunks"
            raise InputError(Violation("loss_chunk_tokens", problem, 'loss = "chunked"'))
        return self

    @model_validator(mode="after")
    def _a_word_for_each_stage(self) -> PartialLayout:
        words, devices = self.recompute, self.pp
        if devices is None or words is None or isinstance(words, str):
            return self
        loops = self.loops or max(1, len(words) // devices)
        stages = devices * loops
        if len(words) != stages:
            given = f"pp {devices}" if self.loops is None else f"pp {devices} x loops {loops}"
            near = value_text((*words, *[words[-1]] * stages)[:stages])
            problem = f"{len(words)} words for the {stages} stages of {given}"
            raise InputError(Violation("recompute", problem, near))
        return self


# All decisions are open.
OPEN = PartialLayout()


class Pins(TypedDict, total=False):
    """The fields of `PartialLayout` as keyword arguments, for callers in Python."""

    schedule: str | None
    loops: int | None
    pp: int | None
    dp: int | None
    tp: int | None
    cp: int | None
    ep: int | None
    micro_batch_size: int | None
    splits: Sequence[int] | None
    sharding: Sharding | None
    island: int | None
    recompute: Recompute | Sequence[Recompute] | None
    blocking: Blocking | Sequence[Blocking] | None
    loss: AskedLoss | None
    loss_chunk_tokens: int | None
