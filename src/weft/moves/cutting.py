"""Methods that cut passes into segments: their ways, the plans they refuse, and their moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.errors import InputError, Violation, nearest
from weft.moves.composition import Composition
from weft.moves.move import Context, Move
from weft.program.segments import Axis

INSIDE = "inside"
# The fields of layouts for the axes of a `ReplicaGrid`, and their names in the table of refusals.
_FIELDS: Mapping[Axis, str] = {"tensor": "tp", "context": "cp", "expert": "ep"}


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """A method whose word `run` says how the ranks along an axis exchange: inside of passes or between them.

    Attributes:
        name: of the method.
        axis: of each replica's grid; with one rank along it, the method does nothing.
        ways: the words, `inside` first.
        apart: the axes that the method refuses, with reasons.
    """

    name: str
    axis: Axis
    ways: tuple[str, ...]
    apart: Mapping[Axis, str] = field(default_factory=dict)

    def way_of(self, plan: Plan) -> str:
        """Return a plan's way.

        Raises:
            InputError: for an unknown way.
        """
        choice = plan.method(self.name)
        word = INSIDE if choice is None else str(choice.options.get("run", INSIDE))
        if word not in self.ways:
            problem = f"{word!r} is not one of {', '.join(self.ways)}"
            raise InputError(Violation(f"plan: methods.{self.name}.run", problem, nearest(word, self.ways)))
        return word

    def cuts(self, plan: Plan) -> bool:
        """Return True if the plan's passes are cut."""
        return self.way_of(plan) != INSIDE and self._is_divided(plan, self.axis)

    def problems_of(self, plan: Plan, graph: LayerGraph) -> list[Violation]:
        """Return the violations of a plan that is cut, by other axes."""
        if not self.cuts(plan):
            return []
        where = f"plan: methods.{self.name}"
        return [
            Violation(where, reason, f"{_FIELDS[axis]} 1")
            for axis, reason in self.apart.items()
            if self._is_divided(plan, axis)
        ]

    @property
    def compositions(self) -> tuple[Composition, ...]:
        """The layouts that the method refuses."""
        return tuple(self._without(axis, reason) for axis, reason in self.apart.items())

    def move(self, way: str, name: str, summary: str, source: str) -> Move:
        """Return the move to one of the ways."""

        def apply(context: Context) -> Plan:
            former = context.plan.method(self.name)
            options = {} if former is None else former.options
            others = (one for one in context.plan.methods if one.name != self.name)
            choice = Choice(name=self.name, options={**options, "run": way})
            return context.plan.model_copy(update={"methods": (*others, choice)})

        return Move(
            name=name,
            contract=Contract.EXACT,
            summary=summary,
            source=source,
            verify=f"weights equal those of exchanges inside of computations bit by bit ({self.name})",
            applies=self._applies,
            apply=apply,
            purposes=frozenset(),
        )

    def _applies(self, context: Context) -> str | None:
        if not self._is_divided(context.plan, self.axis):
            return f"there is one {self.axis} rank"
        return None if self.way_of(context.plan) == INSIDE else f"{self.name} run between segments already"

    def _without(self, axis: Axis, reason: str) -> Composition:
        field = _FIELDS[axis]

        def refuse(job: Job, layout: Layout) -> str | None:
            if not self._asked(job, layout) or getattr(layout, field) == 1:
                return None
            return f"{self.name}: {reason}; nearest {field}: 1"

        return Composition(method=self.name, other=f"{axis} parallelism", reason=reason, refuse=refuse)

    def asked_way(self, job: Job) -> str:
        """Return the way that a job asks for, whatever its layout."""
        chosen = job.method(self.name)
        return INSIDE if chosen is None else str(chosen.options.get("run", INSIDE))

    def _asked(self, job: Job, layout: Layout) -> bool:
        return self.asked_way(job) != INSIDE and getattr(layout, _FIELDS[self.axis]) > 1

    @staticmethod
    def _is_divided(plan: Plan, axis: Axis) -> bool:
        copies = (
            (stage, copies[0]) for stage in range(len(plan.stages)) for copies in plan.like_replicas(stage)
        )
        return any(getattr(plan.grid(*place), axis) > 1 for place in copies)
