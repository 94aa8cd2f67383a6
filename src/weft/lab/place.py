"""The places of a lab's processes. The launcher inside a lab reads them from one variable, in JSON.

This module imports nothing slow: workers enter their places before anything else.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import InputError, RunError, Violation

VARIABLE = "WEFT_LAB"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Place:
    """A network namespace (empty: the host's), the members file of a control group, and cores."""

    namespace: str
    members: str
    cores: tuple[int, ...]

    def enter(self) -> None:
        """Move this process to the place; it must have one thread. Its later threads and children follow.

        Raises:
            OSError: when the kernel refuses, or the lab is gone.
        """
        Path(self.members).write_text(str(os.getpid()))
        os.sched_setaffinity(0, self.cores)
        if self.namespace:
            enter_namespace(Path(self.namespace))


def enter_namespace(path: Path) -> None:
    """Move this process into a network namespace.

    Raises:
        OSError: when the kernel refuses, or the namespace does not exist.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if library.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class LabPlaces:
    """A lab's data for launchers inside it: the bridge's namespace and address, and the nodes' interface.
    Also a place for every rank, and the text of the cluster's file, with the words that name the cluster."""

    hub: str
    hub_address: str
    interface: str
    ranks: tuple[Place, ...]
    cluster: str
    named: str

    def to_text(self) -> str:
        """Return the content of the variable, in JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    def require_ranks(self, ranks: int) -> None:
        """Refuse a lab that is gone, and a job with more ranks than the lab.

        Raises:
            InputError: with the remedy, or the number of the lab's ranks.
        """
        if not Path(self.hub).exists():
            raise InputError(Violation("lab", "it has ended; start this command with weft lab"))
        if ranks > len(self.ranks):
            problem = f"{ranks} ranks, but the lab has {len(self.ranks)} devices"
            raise InputError(Violation("lab", problem, str(len(self.ranks))))


def current_lab(environment: Mapping[str, str] | None = None) -> LabPlaces | None:
    """Return the lab around this process, or None.

    Raises:
        InputError: when a lab has not set the variable.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if text is None:
        return None
    try:
        record = json.loads(text)
        ranks = tuple(
            Place(str(one["namespace"]), str(one["members"]), tuple(map(int, one["cores"])))
            for one in record.pop("ranks")
        )
        return LabPlaces(ranks=ranks, **{name: str(value) for name, value in record.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "was not set by weft lab; unset it, or start this command with weft lab"
        raise InputError(Violation(VARIABLE, problem)) from None


def enter_rank(rank: int) -> None:
    """Move this process to a rank's place, if it runs inside a lab, and set gloo's interface.

    Raises:
        RunError: when the lab is gone.
    """
    lab = current_lab()
    if lab is None:
        return
    try:
        lab.ranks[rank].enter()
    except OSError as error:
        raise RunError(f"rank {rank} cannot enter its node of the lab: {error}") from error
    os.environ["GLOO_SOCKET_IFNAME"] = lab.interface
