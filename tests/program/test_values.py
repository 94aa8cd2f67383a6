"""The registry of values, and what a kind may name."""

from __future__ import annotations

import pytest

from weft.errors import InputError
from weft.program.kinds import KINDS, Kind, KindRegistry
from weft.program.values import PER_RANK, PER_STAGE, VALUES, Read, Use, ValueKind, ValueRegistry

FACTOR = ValueKind(name="factor", scope=PER_STAGE, until="step")


def registries() -> tuple[ValueRegistry, KindRegistry]:
    values = ValueRegistry()
    values.register(FACTOR)
    return values, KindRegistry(values)


def test_a_value_may_be_registered_again_but_not_differently() -> None:
    values, _ = registries()
    assert values.register(FACTOR) is FACTOR
    with pytest.raises(InputError, match="'factor' is already registered differently"):
        values.register(ValueKind(name="factor", scope=PER_RANK, until="step"))


def test_a_value_cannot_add_up_and_be_carried() -> None:
    values, _ = registries()
    with pytest.raises(InputError, match="'average' adds up until it is written again"):
        values.register(ValueKind(name="average", scope=PER_RANK, until="written", accumulates=True))


@pytest.mark.parametrize(
    ("uses", "verb"),
    [
        ({"reads": ("factors",)}, "reads"),
        ({"reads": (Read("factor", otherwise=Read("factors")),)}, "reads"),
        ({"writes": (Use("factors"),)}, "writes"),
    ],
)
def test_a_kind_that_names_an_unknown_value_is_refused(uses: dict[str, tuple[Use]], verb: str) -> None:
    _, kinds = registries()
    with pytest.raises(InputError) as caught:
        kinds.register(Kind(name="curvature", symbol="C", stream="compute", **uses))
    assert [str(violation) for violation in caught.value.violations] == [
        f"kinds: curvature {verb} 'factors', a value that nobody has declared (nearest valid: factor)"
    ]
    assert len(kinds) == 0


def test_every_value_has_a_maker_and_a_reader() -> None:
    made = {use.value for kind in KINDS for use in kind.all_writes}
    read = {choice.value for kind in KINDS for use in kind.all_reads for choice in use.choices}
    names = {value.name for value in VALUES}
    assert names <= made
    # Norms of micro-batches and loads of experts are told: the host reads them.
    assert names - {"micro_batch_norms", "expert_loads"} <= read
