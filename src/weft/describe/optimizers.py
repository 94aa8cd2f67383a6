"""Memory and traffic per parameter of optimizers, by their names in run files.

A run file names one of `KNOWN_OPTIMIZERS`, an optimizer from the entry-point group `weft.optimizers`, or
`package.module:Optimizer`. weft calls a package's optimizer with parameter groups and `lr`. Its attribute
`weft_work` states its states: an `OptimizerWork`, or a mapping with its fields.
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
from weft.installed import imported

GROUP = "weft.optimizers"
WORK = "weft_work"
_WHERE = "optimizer.name"

# Above any optimizer's counts; products with parameter counts are still 64-bit integers.
_Few = Annotated[int, Field(ge=0, le=1000)]


class OptimizerWork(BaseModel):
    """An optimizer's kept states and its traffic in one step, per parameter that a rank steps.

    Attributes:
        states: tensors as large as the parameters, in the precision of the stepped parameters.
        state_bytes: additional kept bytes, independent of the precision.
        moved_bytes: bytes of kept states that one update reads and writes; None: each byte is read once and
            written once.
        elementwise: each element is stepped independently, so that ranks may step one shard each.
        whole_sums: numbers per parameter tensor that each exchange of a step adds up over all ranks of the
            stage. So an optimizer that needs norms of whole tensors steps shards, too.
        unit_gradient: the optimizer steps with the gradient divided by the norm of the whole gradient.
        orthogonalisations: iterations that make the update of every hidden matrix nearly orthogonal; 0: none.
            So replicas that share a stage bring its matrices together before they step.
        other_states: additional tensors of parameters that are no hidden matrices.
        step_states: tensors as large as the parameters that exist during a step only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    states: _Few = 0
    state_bytes: _Few = 0
    moved_bytes: _Few | None = None
    elementwise: bool = False
    whole_sums: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = ()
    unit_gradient: bool = False
    orthogonalisations: _Few = 0
    other_states: _Few = 0
    step_states: _Few = 0

    @property
    def steps_shards(self) -> bool:
        """True if replicas may step one shard of a parameter each."""
        return self.divides_matrices or bool(self.orthogonalisations)

    @property
    def divides_matrices(self) -> bool:
        """True if also tensor ranks, each with its own part of every matrix, may step their parts."""
        return self.elementwise or bool(self.whole_sums)

    def kept_bytes(self, element_bytes: int) -> int:
        """Return the kept bytes per parameter; a stepped element has `element_bytes`."""
        return self.states * element_bytes + self.state_bytes

    def touched_bytes(self, element_bytes: int) -> int:
        """Return the bytes of kept states per parameter that one update reads and writes."""
        return 2 * self.kept_bytes(element_bytes) if self.moved_bytes is None else self.moved_bytes


# Two moments (Kingma and Ba, arXiv 1412.6980), for every kind of weight decay.
ADAMW = OptimizerWork(states=2, elementwise=True)
# Kernels over lists of tensors take one after the other, so that all roots of second moments exist at once
# (`foreach` of torch's optimizers).
FOREACH_ADAMW = ADAMW.model_copy(update={"step_states": 1})
# The sum of gradients that decays with the momentum; nothing is kept without momentum.
MOMENTUM_SGD = OptimizerWork(states=1, elementwise=True)
PLAIN_SGD = OptimizerWork(elementwise=True)
# AdamW's moments; the norms of the weights and of the update (You et al., arXiv 1904.00962). Kernels that are
# not fused move fp32 masters, gradients and states several times.
LAMB = OptimizerWork(states=2, moved_bytes=120, whole_sums=(2,))
NVLAMB = LAMB.model_copy(update={"unit_gradient": True})
# First the norm of the gradient, then those of the weights and of both parts of the update (Zheng et al.,
# arXiv 2006.13484).
LANS = OptimizerWork(states=2, moved_bytes=264, whole_sums=(1, 3))
# The momentum of matrices, and one more moment of other parameters (kellerjordan.github.io/posts/muon).
# Kernels between the products move fp32 masters, gradients and momenta several times.
MUON = OptimizerWork(states=1, moved_bytes=42, orthogonalisations=5, other_states=1)

KNOWN_OPTIMIZERS: Mapping[str, OptimizerWork] = MappingProxyType(
    {
        "adamw": ADAMW,
        "adam": ADAMW,
        "sgd": MOMENTUM_SGD,
        "lamb": LAMB,
        "nvlamb": NVLAMB,
        "lans": LANS,
        "muon": MUON,
    }
)


# The optimizers with each kind of states, whose names they share.
_STATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "moments": ("adamw", "adam", "lamb", "nvlamb", "lans"),
        "momentum": ("sgd",),
        "momentum of matrices": ("muon",),
    }
)


def states_of(name: str, *, momentum: float | None = None) -> str:
    """Return what an optimizer keeps from step to step, in words; empty if it keeps nothing.

    A run may go on with an optimizer that keeps the same.
    """
    if name == "sgd" and momentum == 0.0:
        return ""
    known = (f"{kind} ({', '.join(names)})" for kind, names in _STATES.items() if name in names)
    return next(known, f"those of {name}")


class Counted(NamedTuple):
    """The work of an optimizer, and in words the assumption about it; empty without an assumption."""

    work: OptimizerWork
    assumed: str = ""


def counted_work(name: str, *, momentum: float | None = None, state_bytes: int | None = None) -> Counted:
    """Return the work of the optimizer with these keys of a run file's `[optimizer]` table.

    Raises:
        InputError: when a package's optimizer cannot be imported, or its `weft_work` is invalid.
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
    """Return the `weft_work` of an optimizer or its maker; None without this attribute.

    Raises:
        InputError: when the attribute is not an `OptimizerWork`.
    """
    said = getattr(optimizer, WORK, None)
    if said is None or isinstance(said, OptimizerWork):
        return said
    try:
        return OptimizerWork.model_validate(said)
    except ValidationError as error:
        raise InputError(violations_of(error, f"{_WHERE}: {WORK} of {name}", OptimizerWork)) from None


def own_optimizer(name: str) -> Any:
    """Import the maker of a package's optimizer, by a registered name or by `package.module:Optimizer`.

    Raises:
        InputError: when it cannot be imported or called.
    """
    entry = _registered().get(name)
    made = imported(_WHERE, name if entry is None else entry.value)
    if not callable(made):
        raise InputError(Violation(_WHERE, f"{name!r} is {type(made).__name__}, which makes no optimizer"))
    return made


def require_optimizer(name: str, where: str = "") -> str:
    """Refuse a name without an optimizer, else return it; nothing is imported.

    Raises:
        InputError: with the nearest name.
    """
    # Installed packages are searched only for names other than weft's own.
    if name in KNOWN_OPTIMIZERS or is_importable(name) or name in (registered := _registered()):
        return name
    names = [*KNOWN_OPTIMIZERS, *registered]
    problem = f"{shown(name)} is neither {', '.join(names)} nor of the form package.module:Optimizer"
    raise InputError(Violation(where, problem, nearest(name, names) or "adamw"))


def _registered() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
