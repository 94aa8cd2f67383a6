"""Synchronisation of replicas: the possible methods of a plan's `sync`, which methods contribute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from weft.bundles import parts
from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import SCALED, Choice, Plan, Stage
from weft.describe.reading import violations_of
from weft.describe.toml_table import Count, TomlTable
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest
from weft.installed import installed_names

if TYPE_CHECKING:
    from weft.describe.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The communication and computation of replicas for each byte of a collective.

    Attributes:
        inside, between: bytes on links inside nodes, and between them. 0: the collective has no part there,
            because another instruction carries it.
        passes: bytes that each rank reads or writes for it.
        encoded, decoded: fp32 values that each rank brings into few bits for it, and back.
        rounds: collectives, one after the other, that carry equal parts of the bytes.
    """

    inside: float = 1.0
    between: float = 1.0
    passes: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    rounds: int = 1


Table = TypeVar("Table", bound=TomlTable)

# Replicas add up their whole gradients.
DENSE = "dense"
# The entry points of other packages' synchronisers without options.
SYNCHRONISERS = "weft.synchronisers"
# The planner chooses among all methods that the goal's contract admits.
AUTO = "auto"
# The reason of methods whose replicas cannot be absent.
ALWAYS_ALL = "all replicas meet, and none can be absent"
# All bytes are sent uncompressed.
AS_IT_IS = Wire()


# The option is decided from the predicted step of the chosen plan.
DECIDED = "auto"


class StepsApart(TomlTable):
    """The keys of `[sync]` of a method whose replicas step by themselves, and may rest in some steps."""

    @property
    def steps_apart(self) -> int | None:
        """The steps between two meetings at which replicas agree; None if they never differ."""
        raise NotImplementedError

    def taken(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the steps of a cycle that each replica takes; one takes the last."""
        raise NotImplementedError


class LocalSteps(StepsApart):
    """The common keys of `[sync]` of methods whose replicas step by themselves and then agree on weights."""

    every: Count = Field(description="steps that replicas take by themselves between two averagings")
    replica_steps: str = Field(
        default="",
        description='how many of them each replica takes, such as "8 3"; auto: as many as end with the '
        "fastest replica's; default: all",
    )

    @model_validator(mode="after")
    def _steps_of_a_cycle(self) -> LocalSteps:
        words = self.replica_steps.split()
        if words in ([], [DECIDED]):
            return self
        wrong = next((one for one in words if not one.isdecimal() or not 1 <= int(one) <= self.every), None)
        if wrong is not None:
            problem = f"{shown(wrong)} is not one of 1 to {self.every}, the steps of a cycle"
            raise InputError([Violation("replica_steps", problem, DECIDED)])
        if str(self.every) not in words:
            problem = f"no replica takes all {self.every} steps of a cycle"
            raise InputError([Violation("replica_steps", problem, DECIDED)])
        return self

    @property
    def steps_apart(self) -> int:
        return self.every

    def steps_of(self, replicas: int) -> tuple[int, ...]:
        """Return the steps of a cycle that each replica takes, at least one entry for each of `replicas`."""
        words = self.replica_steps.split()
        return (self.every,) * replicas if words in ([], [DECIDED]) else tuple(int(word) for word in words)

    def taken(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the steps of a cycle that each replica takes, evenly spread.

        Every replica takes the last one.
        """
        return tuple(
            tuple(
                step
                for step in range(self.every)
                if (step + 1) * steps // self.every > step * steps // self.every
            )
            for steps in self.steps_of(replicas)
        )


@dataclass(frozen=True, kw_only=True)
class SyncMethod:
    """One word of `sync.method`.

    Attributes:
        name: the word.
        table: its additional keys of `[sync]`, which are the options of a plan's `sync`.
        wire, gathered: return the communication and computation of a plan's reductions, and of its gathers
            of stepped weights, from the checked options.
        sent_share: returns the bytes sent for each byte of a stage's gradient, from the checked options, the
            plan, its graph and the stage; `wire` counts on top. 1 where only the plan matters.
        derived: by key, the options that follow from the places of a plan's stages in the cluster.
        logged: returns whether a run can log the payloads of those gathers, from the checked options.
        local_gradients: each replica steps with its own gradient, without adding other replicas' gradients.
        kept: returns the numbers that each rank keeps for every weight, from the options and the number of
            replicas.
        proposals: returns the options that a planner tries for a job, each as a mapping of keys to values.
        codecs: returns the keys that change the codec of one piece of a stage's gradient alone, from the
            checked options, the stage and the piece; once for each codec that sends no fewer bits, and with
            which ranks keep the same tensors.
        indispensable: returns why a run cannot go on without one of its replicas, and take it in again, from
            the checked options; None: it can.
    """

    name: str
    table: type[TomlTable]
    local_gradients: bool = False
    wire: Callable[[Any, Plan], Wire] = lambda options, plan: AS_IT_IS
    gathered: Callable[[Any, Plan], Wire] = lambda options, plan: AS_IT_IS
    logged: Callable[[Any], bool] = lambda options: False
    sent_share: Callable[[Any, Plan, LayerGraph, int], float] = lambda options, plan, graph, stage: 1.0
    derived: Mapping[str, Callable[[Sequence[Stage], Cluster], int]] = field(default_factory=dict)
    kept: Callable[[Any, int], float] = lambda options, replicas: 0.0
    proposals: Callable[[Job], Sequence[Mapping[str, Any]]] = lambda job: ({},)
    codecs: Callable[[Any, int, int], Sequence[Mapping[str, Any]]] = lambda options, stage, piece: ()
    indispensable: Callable[[Any], str | None] = lambda options: ALWAYS_ALL


def proposed_steps(job: Job) -> Sequence[Mapping[str, Any]]:
    """Return the proposals of methods that step replicas apart: `every`, the steps between two meetings."""
    return [{"every": every} for every in (4, 8, 16, 32)]


def sync_methods() -> Mapping[str, SyncMethod]:
    """Return synchronisation methods by name; methods without options may be missing."""
    return {one.name: one for one in parts(SyncMethod)}


def sync_problem(sync: Choice) -> Violation | None:
    """Return why no replicas can agree by a plan's `sync`, or None; nothing of the runtime is imported."""
    methods = sync_methods()
    if sync.name in methods:
        return None  # its own rules check the options
    known = [DENSE, *methods, *installed_names(SYNCHRONISERS)]
    if sync.name not in known:
        problem = f"{shown(sync.name)} is not one of {', '.join(sorted(known))}"
        return Violation("sync", problem, nearest(sync.name, known))
    if sync.options:
        problem = f"{shown(sync.name)} takes no options, given {', '.join(sorted(sync.options))}"
        return Violation("sync", problem)
    return None


def keeps_gradients_local(sync: Choice) -> bool:
    """Return True if each replica steps with its own gradient."""
    method = sync_methods().get(sync.name)
    return method is not None and method.local_gradients


def local_steps(sync: Choice, where: str = "sync") -> LocalSteps | None:
    """Return the options of a method whose replicas step by themselves and then agree; None for others.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    if method is None or not issubclass(method.table, LocalSteps):
        return None
    options = sync_options(sync.name, sync.options, where)
    assert isinstance(options, LocalSteps), "its own table checks them"
    return options


def micro_batches_of_steps(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return, by step of a cycle, the numbers in the global batch of the micro-batches that run.

    The cycle has one step unless replicas rest in some steps.

    Raises:
        InputError: as `sync_options` does.
    """
    shares = [copy.micro_batches for copy in plan.stages[0].replicas]
    ends = list(accumulate(shares))
    of_replica = [range(end - share, end) for share, end in zip(shares, ends, strict=True)]
    options = _apart(plan.sync)
    steps = ((0,),) if options is None else options.taken(len(shares))
    cycle = 1 + max(one[-1] for one in steps)
    if all(len(one) == cycle for one in steps):
        return (tuple(range(ends[-1])),)
    taken = list(map(frozenset, steps))
    return tuple(
        tuple(
            number
            for numbers, of_cycle in zip(of_replica, taken, strict=True)
            if step in of_cycle
            for number in numbers
        )
        for step in range(cycle)
    )


def kept_numbers(sync: Choice, replicas: int) -> float:
    """Return the numbers that each rank keeps for every weight between two meetings of replicas.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    return 0.0 if method is None else method.kept(sync_options(sync.name, sync.options), replicas)


def reduction_problem(reduce_precision: str | None, precision: str, sync: str) -> Violation | None:
    """Return why replicas cannot add up gradients in `reduce_precision`, or None if they can."""
    if reduce_precision is None:
        return None
    if sync != DENSE:
        problem = f"{reduce_precision}: with sync {sync!r} replicas do not send each other plain gradients"
        return Violation("reduce_precision", problem, "no reduce_precision")
    if reduce_precision in SCALED and precision not in SCALED:
        # Smaller gradients than 6e-8 would become zero, and larger ones than 65504 infinite.
        problem = f"{reduce_precision} has room for gradients of scaled losses, and {precision} scales none"
        return Violation("reduce_precision", problem, "bf16")
    return None


def proposals_of(name: str, job: Job) -> tuple[Choice, ...]:
    """Return a synchronisation method with each of the options that it proposes for a job."""
    method = sync_methods().get(name)
    proposed = ({},) if method is None else method.proposals(job)
    return tuple(Choice(name=name, options=dict(options)) for options in proposed)


def with_keys(sync: Choice, keys: Mapping[str, Any]) -> Choice:
    """Return a synchronisation with other values of some keys; defaults are left out.

    Raises:
        InputError: as `sync_options` does.
    """
    table = sync_options(sync.name, {**sync.options, **keys})
    return Choice(name=sync.name, options=table.model_dump(exclude_defaults=True))


def other_codecs(sync: Choice, stage: int, piece: int) -> Sequence[Choice]:
    """Return a synchronisation with each other codec of one piece that sends no fewer bits.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    if method is None:
        return []
    options = sync_options(sync.name, sync.options)
    return [with_keys(sync, keys) for keys in method.codecs(options, stage, piece)]


def indispensable(sync: Choice) -> str | None:
    """Return why a run cannot go on without one of its replicas, and take it in again; None: it can.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    return ALWAYS_ALL if method is None else method.indispensable(sync_options(sync.name, sync.options))


def steps_apart(sync: Choice) -> int | None:
    """Return the steps between two meetings of replicas that step by themselves; None for others.

    Raises:
        InputError: as `sync_options` does.
    """
    options = _apart(sync)
    return None if options is None else options.steps_apart


def _apart(sync: Choice) -> StepsApart | None:
    method = sync_methods().get(sync.name)
    if method is None or not issubclass(method.table, StepsApart):
        return None
    options = sync_options(sync.name, sync.options)
    assert isinstance(options, StepsApart), "its own table checks them"
    return options


def options_in(plan: Plan, method: str, table: type[Table]) -> Table | None:
    """Return the checked options of a method, with this table, in a plan; None if it has another `sync`.

    Raises:
        InputError: for unknown or wrong options.
    """
    if plan.sync.name != method:
        return None
    options = sync_options(method, plan.sync.options, "plan: sync.options")
    assert isinstance(options, table), "its own table checks them"
    return options


def sync_words(sync: Choice) -> str:
    """Return a synchronisation method with its options in words."""
    options = (f"{name.replace('_', ' ')} {value}" for name, value in sync.options.items())
    return ", ".join([sync.name, *options])


def wire_of(plan: Plan) -> Wire:
    """Return the communication and computation of a plan's reductions.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(plan.sync.name)
    return AS_IT_IS if method is None else method.wire(_options_of(plan), plan)


def gather_wire_of(plan: Plan) -> Wire:
    """Return the communication and computation of a plan's gathers of weights; as `wire_of`."""
    method = sync_methods().get(plan.sync.name)
    return AS_IT_IS if method is None else method.gathered(_options_of(plan), plan)


def is_logged(sync: Choice) -> bool:
    """Return True if a run can log the payloads in which replicas learn each other's stepped weights.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    return method is not None and method.logged(sync_options(sync.name, sync.options))


def sent_share_of(plan: Plan, graph: LayerGraph, stage: int) -> float:
    """Return the bytes that replicas send for each byte of a stage's gradient; as `wire_of`."""
    method = sync_methods().get(plan.sync.name)
    return 1.0 if method is None else method.sent_share(_options_of(plan), plan, graph, stage)


def _options_of(plan: Plan) -> TomlTable:
    return sync_options(plan.sync.name, plan.sync.options)


def derived_options(sync: Choice, stages: Sequence[Stage], cluster: Cluster) -> Mapping[str, int]:
    """Return the options of a synchronisation that follow from the places of its replicas, by key."""
    method = sync_methods().get(sync.name)
    return {} if method is None else {key: of(stages, cluster) for key, of in method.derived.items()}


def asked_options(sync: Choice) -> Mapping[str, int | float | str | bool]:
    """Return the options of a synchronisation without those that follow from places."""
    method = sync_methods().get(sync.name)
    derived = () if method is None else method.derived
    return {key: value for key, value in sync.options.items() if key not in derived}


def sync_options(name: str, given: Mapping[str, Any], where: str = "sync") -> TomlTable:
    """Check and return the options of a synchronisation method that has options.

    Raises:
        InputError: with all mistakes in the options.
    """
    table = sync_methods()[name].table
    try:
        return table.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(violations_of(error, where, table)) from None
