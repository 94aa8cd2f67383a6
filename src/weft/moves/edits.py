"""Moves that edit layouts: `layout_move` makes a card that edits plans through their layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Edit, Move, Purpose

Edits = Callable[[Job, Layout], Iterable[Edit]]


def layout_move(
    name: str,
    edits: Edits,
    *purposes: Purpose,
    otherwise: str,
    summary: str,
    source: str,
    verify: str,
    contract: Contract = Contract.EXACT,
    asked_by: tuple[str, str] | None = None,
) -> Move:
    """Build the card of a move that edits layouts; the arguments are fields of `Move`.

    `otherwise`: the reason why the move does not apply when there are no edits.
    """

    def made(context: Context) -> Edit | str:
        """Return the first legal edit, or the reason why there is none."""
        job = context.job
        try:
            layout = layout_of(context.plan)
        except InputError as error:
            return str(error.violations[0])
        if build_plan(job, layout, flops_per_layer(job)).plan_id != context.plan.plan_id:
            return "the plan has what no layout says"
        refused: str | None = None
        for edit in edits(job, layout):
            reason = refuse(job, edit.layout)
            if reason is None:
                return edit
            refused = refused or reason
        return refused or otherwise

    def applies(context: Context) -> str | None:
        edit = made(context)
        return edit if isinstance(edit, str) else None

    def apply(context: Context) -> Plan:
        edit, job = made(context), context.job
        assert isinstance(edit, Edit), f"{name} was applied although it does not apply: {edit}"
        return build_plan(job, edit.layout, flops_per_layer(job))

    return Move(
        name=name,
        contract=contract,
        summary=summary,
        source=source,
        verify=verify,
        applies=applies,
        apply=apply,
        edits=edits,
        purposes=frozenset(purposes),
        asked_by=asked_by,
    )
