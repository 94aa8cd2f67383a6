"""Files of measured steps with their predictions in `WEFT_HOME`, to read, copy, share and delete.

    measurements/corrections-MODEL-PRECISION-HARDWARE.json      Residuals

A file covers one model in one precision on one machine or cluster; its name and its content both say so.
It holds the observations; each use fits corrections to them anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.reading import read_json, violations_of
from weft.errors import InputError, Violation
from weft.predict.corrections import Observation, newest
from weft.predict.cost.calibration import FOLDER, file_name, write_measurement

_PREFIX = "corrections-"


class Residuals(BaseModel):
    """Measured steps of one model in one precision on one machine or cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    model: str
    model_fingerprint: str
    precision: str
    hardware: str
    observations: tuple[Observation, ...] = ()

    def with_more(self, more: Sequence[Observation]) -> Residuals:
        """Return a copy with further measurements; the newest are kept, each once."""
        return self.model_copy(update={"observations": newest([*self.observations, *more])})

    def of(self, sources: Mapping[str, str]) -> tuple[Observation, ...]:
        """Return the observations with predictions from these sources, by kind of device."""
        return tuple(one for one in self.observations if one.sources == sources)

    def by_sources(self) -> Iterator[tuple[Observation, ...]]:
        """Yield the observations of each combination of sources."""
        for key in sorted({tuple(sorted(one.sources.items())) for one in self.observations}):
            yield self.of(dict(key))


def hardware_of(cluster: Cluster) -> str:
    """Return the composition of a cluster in words, with a hash of its links and relative speeds.

    The cluster's name does not count, nor do the devices' data sheets. The clock that a processor reports may
    change from one hour to the next.
    """
    words = "+".join(f"{group.count}x{group.devices}x{group.device.name}" for group in cluster.groups)
    record = {
        "nodes": [[asdict(group.link), sorted(group.speeds)] for group in cluster.groups],
        "links": {" ".join(pair): asdict(link) for pair, link in sorted(cluster.links.items())},
    }
    return f"{words}-{hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]}"


def empty_residuals(graph: LayerGraph, precision: str, cluster: Cluster) -> Residuals:
    """Return residuals without observations, for a model on a cluster."""
    return Residuals(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        precision=precision,
        hardware=hardware_of(cluster),
    )


def save_residuals(residuals: Residuals, home: Path) -> Path:
    """Write residuals in place of older ones of the same model and hardware; return the file's path.

    Raises:
        InputError: when the file cannot be written.
    """
    text = json.dumps(residuals.model_dump(mode="json"), indent=1, sort_keys=True)
    return write_measurement(_path(residuals, home), text + "\n")


def load_residuals(graph: LayerGraph, precision: str, cluster: Cluster, home: Path) -> Residuals:
    """Read the measured steps of a model on a cluster; without a file there are no observations.

    Raises:
        InputError: when the file is broken, or belongs to another model, precision or hardware.
    """
    wanted = empty_residuals(graph, precision, cluster)
    path = _path(wanted, home)
    if not path.exists():
        return wanted
    found = read_residuals(path)
    for name in ("model_fingerprint", "precision", "hardware"):
        has, asked = getattr(found, name), getattr(wanted, name)
        if has != asked:
            problem = f"was learned with {name.replace('_', ' ')} {has}, not {asked}; delete it"
            raise InputError(Violation(str(path), problem))
    return found


def read_residuals(path: Path) -> Residuals:
    """Read a file of measured steps.

    Raises:
        InputError: when the file cannot be read; it lists every error in it.
    """
    record = read_json(path)
    try:
        return Residuals.model_validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        raise InputError(violations_of(error, str(path), Residuals)) from None


def residual_files(home: Path) -> list[Path]:
    """Return the paths of all files of measured steps, sorted by name."""
    return sorted((home / FOLDER).glob(f"{_PREFIX}*.json"))


def _path(residuals: Residuals, home: Path) -> Path:
    key = f"{residuals.model_fingerprint}-{residuals.precision}-{residuals.hardware}"
    return home / FOLDER / f"{_PREFIX}{file_name(key)}.json"
