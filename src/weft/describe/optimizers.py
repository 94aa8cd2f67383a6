"""What an optimizer keeps of every parameter and moves at every step, by its name in a run file.

A run file names one of `KNOWN_OPTIMIZERS`, one that a package registers in the entry-point group
`weft.optimizers`, or `package.module:Optimizer`. A package's optimizer is called with parameter groups and
`lr`, and says what it keeps in an attribute `weft_work`: an `OptimizerWork`, or a mapping with its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.describe.reading import violations_of
from weft.describe.toml_table import is_importable
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

GROUP = "weft.optimizers"
WORK = "weft_work"
_WHERE = "optimizer.name"

# Beyond any optimizer; keeps products with parameter counts 64-bit integers.
_Few = Annotated[int, Field(ge=0, le=1000)]


class OptimizerWork(BaseModel):
    """What an optimizer keeps between steps and moves in one, per parameter that a rank steps.

    Attributes:
        states: tensors as large as the parameters, in the precision that is stepped.
        state_bytes: bytes kept beside them, whatever the precision.
        moved_bytes: bytes of all that is kept which one update reads and writes; None: each byte of it is
            read once and written once.
        elementwise: every element is stepped by itself, so that ranks may step a share each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    states: _Few = 0
    state_bytes: _Few = 0
    moved_bytes: _Few | None = None
    elementwise: bool = False

    def kept_bytes(self, element_bytes: int) -> int:
        """Return bytes kept per parameter, where an element that is stepped has so many."""
        return self.states * element_bytes + self.state_bytes

    def touched_bytes(self, element_bytes: int) -> int:
        """Return bytes of them that one update reads and writes."""
        return 2 * self.kept_bytes(element_bytes) if self.moved_bytes is None else self.moved_bytes


# Two moments (Kingma and Ba, arXiv 1412.6980), however weights decay.
ADAMW = OptimizerWork(states=2, elementwise=True)
# The sum of gradients that fades with the momentum; without one nothing is kept.
MOMENTUM_SGD = OptimizerWork(states=1, elementwise=True)
PLAIN_SGD = OptimizerWork(elementwise=True)

KNOWN_OPTIMIZERS: Mapping[str, OptimizerWork] = MappingProxyType(
    {"adamw": ADAMW, "adam": ADAMW, "sgd": MOMENTUM_SGD}
)


class Counted(NamedTuple):
    """What is counted of an optimizer, and in words what was assumed because nobody says it."""

    work: OptimizerWork
    assumed: str = ""


def counted_work(name: str, *, momentum: float | None = None, state_bytes: int | None = None) -> Counted:
    """Return the work of the optimizer that a run file's `[optimizer]` table names, by its keys.

    Raises:
        InputError: when another package's optimizer cannot be imported or says what makes no sense.
    """
    if name in KNOWN_OPTIMIZERS:
        return Counted(PLAIN_SGD if name == "sgd" and momentum == 0.0 else KNOWN_OPTIMIZERS[name])
    if state_bytes is not None:
        return Counted(OptimizerWork(state_bytes=state_bytes))
    declared = declared_work(own_optimizer(name), name)
    if declared is not None:
        return Counted(declared)
    words = (
        f"AdamW's two states per parameter, because {name} does not say what it keeps; "
        f"its attribute {WORK} or the key optimizer.state_bytes says it"
    )
    return Counted(ADAMW.model_copy(update={"elementwise": False}), words)


def declared_work(optimizer: object, name: str) -> OptimizerWork | None:
    """What an optimizer, or what makes it, says of itself; None where it says nothing.

    Raises:
        InputError: when that is no `OptimizerWork`.
    """
    said = getattr(optimizer, WORK, None)
    if said is None or isinstance(said, OptimizerWork):
        return said
    try:
        return OptimizerWork.model_validate(said)
    except ValidationError as error:
        raise InputError(violations_of(error, f"{_WHERE}: {WORK} of {name}", OptimizerWork)) from None


def own_optimizer(name: str) -> Any:
    """What makes an optimizer of another package: registered under a name, or `package.module:Optimizer`.

    Raises:
        InputError: when it cannot be imported or called.
    """
    entry = _registered().get(name) or EntryPoint(name=name, value=name, group=GROUP)
    try:
        made = entry.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(Violation(_WHERE, f"{name!r} cannot be imported: {error}")) from None
    if not callable(made):
        raise InputError(Violation(_WHERE, f"{name!r} is {type(made).__name__}, which makes no optimizer"))
    return made


def require_optimizer(name: str, where: str = "") -> str:
    """Refuse what names no optimizer; nothing is imported for it.

    Raises:
        InputError: with the nearest name.
    """
    # Installed packages are only searched for names that are not weft's own.
    if name in KNOWN_OPTIMIZERS or is_importable(name) or name in (registered := _registered()):
        return name
    names = [*KNOWN_OPTIMIZERS, *registered]
    problem = f"{shown(name)} is neither {', '.join(names)} nor of the form package.module:Optimizer"
    raise InputError(Violation(where, problem, nearest(name, names) or "adamw"))


def _registered() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
