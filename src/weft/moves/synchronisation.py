"""`SyncChoice`: the rules and the move of a synchronisation method, from the one reason to refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan, Sharding
from weft.describe.plan_file import PlanRule
from weft.describe.synchronisation import derived_options, options_in, sync_options
from weft.describe.toml_table import TomlTable
from weft.errors import InputError, Violation
from weft.moves.composition import Composition
from weft.moves.move import Context, Move
from weft.moves.sharers import replicas_of

METHOD = "sync.method"
NOBODY = "one replica sends nothing"

Table = TypeVar("Table", bound=TomlTable)


class Replication(NamedTuple):
    """The decisions on replicas that a method may not go together with.

    Attributes:
        replicas: of the stage with the fewest.
        width: ranks of a replica, of the stage with the most.
        device_kinds: kinds of devices in the cluster; 1 where only the plan is known.
    """

    sharding: Sharding
    island: int | None
    precision: str
    replicas: int
    width: int = 1
    device_kinds: int = 1

    @classmethod
    def of_plan(cls, plan: Plan, device_kinds: int = 1) -> Replication:
        replicas = min(len(stage.replicas) for stage in plan.stages)
        width = max(len(stage.replicas[0].ranks) for stage in plan.stages)
        return cls(plan.sharding, plan.island, plan.precision, replicas, width, device_kinds)


class SyncRefusal(NamedTuple):
    """A reason against a method, and the key whose `nearest` value removes it."""

    reason: str
    key: str = METHOD
    nearest: str = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoice(Generic[Table]):
    """A synchronisation method that replicas' layouts may refuse.

    Attributes:
        method: its word of `sync.method`.
        table: its options.
        refuse: returns the first reason against it, or None.
        also: yields further violations of a plan with these options.
    """

    method: str
    table: type[Table]
    refuse: Callable[[Table, Replication], SyncRefusal | None]
    also: Callable[[Plan, Table], Iterable[Violation]] = lambda plan, options: ()
    moved_options: Mapping[str, Any] = field(default_factory=dict)

    def rules(self, *, other: str, reason: str) -> tuple[Composition, PlanRule]:
        """Return the rules for layouts and for plans; the arguments are fields of `Composition`."""
        composition = Composition(method=self.method, other=other, reason=reason, refuse=self._of_layout)
        return composition, PlanRule(refuse=self._of_plan)

    def move(
        self,
        *,
        name: str,
        contract: Contract,
        summary: str,
        source: str,
        verify: str,
        otherwise: Callable[[Context], str | None] = lambda context: None,
    ) -> Move:
        """Return the move to the method; the arguments are fields of `Move`.

        `otherwise` returns a further reason why it does not apply, or None.
        """

        def apply(context: Context) -> Plan:
            return context.plan.model_copy(update={"sync": self.chosen(context)})

        return Move(
            name=name,
            contract=contract,
            summary=summary,
            source=source,
            verify=verify,
            applies=lambda context: self._applies(context) or otherwise(context),
            apply=apply,
            purposes=frozenset(),
            asked_by=(METHOD, self.method),
        )

    def chosen(self, context: Context) -> Choice:
        """Return the method with the options of its move, and those that follow from places."""
        sync = Choice(name=self.method, options=self.moved_options)
        derived = derived_options(sync, context.plan.stages, context.cluster)
        return Choice(name=self.method, options={**sync.options, **derived})

    def _applies(self, context: Context) -> str | None:
        plan = context.plan
        if plan.sync.name == self.method:
            return f"the plan already has sync {self.method}"
        options = self.table.model_validate(dict(self.moved_options))
        found = self.refuse(options, Replication.of_plan(plan, _device_kinds(context.job)))
        return None if found is None else found.reason

    def _of_layout(self, job: Job, layout: Layout) -> str | None:
        if layout.sync != self.method:
            return None
        options = sync_options(self.method, {**job.sync_options, **layout.sync_options})
        assert isinstance(options, self.table), "its own table checks them"
        replicas, kinds = replicas_of(layout), _device_kinds(job)
        of = Replication(layout.sharding, layout.island, job.precision, replicas, layout.width, kinds)
        found = self.refuse(options, of)
        if found is None:
            return None
        return f"{self.method}: {found.reason}; nearest {found.key}: {found.nearest}"

    def _of_plan(self, plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
        try:
            options = options_in(plan, self.method, self.table)
        except InputError as error:
            yield from error.violations
            return
        if options is None:
            return
        found = self.refuse(options, Replication.of_plan(plan))
        if found is not None:
            where = found.key if found.key != METHOD else "sync"
            yield Violation(f"plan: {where}", f"{self.method}: {found.reason}", found.nearest)
        yield from self.also(plan, options)


def _device_kinds(job: Job) -> int:
    return len({group.device.name for group in job.cluster.groups})
