"""Results of `weft measure`, as files in `WEFT_HOME` to read, copy and share.

    measurements/machine-DEVICE.json           a MachineMeasurement
    measurements/profile-MODEL-...-NAME.csv    a LayerProfile: PROFILE_COLUMNS after one comment line of JSON
    measurements/cluster-NAME.toml             a CLUSTER.toml with the links that were measured in a lab

The comment ties a profile to a model, a sequence and a precision. Any CSV file with these columns is a
profile, too. Without the comment it fits every model that has its layers.

Each write goes to a temporary file and renames it, so that readers never see a partial file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, TypeVar

from weft.describe.catalogue import canonical_name
from weft.describe.cluster import Cluster
from weft.describe.cluster_tables import to_toml
from weft.errors import InputError, Violation
from weft.files import write_whole
from weft.predict.profile import COLLECTIVES, PROFILE_COLUMNS, LayerProfile, LayerTiming, MachineMeasurement

FOLDER = "measurements"
VERSION = 1

Measured = TypeVar("Measured", MachineMeasurement, LayerProfile)


def save_machine(machine: MachineMeasurement, home: Path) -> Path:
    """Write a machine's measurement in place of an older one of the same device; return the path.

    Raises:
        InputError: when the file cannot be written.
    """
    text = json.dumps({"version": VERSION, **asdict(machine)}, indent=1, sort_keys=True)
    return write_measurement(_machine_path(machine.device, home), text + "\n")


def load_machine(device: str, home: Path) -> MachineMeasurement | None:
    """Read the measurement of a device, or return None when it was never measured.

    Raises:
        InputError: when the file is broken.
    """
    return _read(_machine_path(device, home), _machine_from)


def save_profile(profile: LayerProfile, home: Path) -> Path:
    """Write a profile in place of one of the same model, device, sequence and precision; return the path.

    Raises:
        InputError: when the profile is empty or mixes devices, or the file cannot be written.
    """
    devices = sorted({timing.device for timing in profile.timings})
    if len(devices) != 1:
        raise InputError(Violation("layer profile", f"must be of one device, not of {devices or 'none'}"))
    head = {
        "version": VERSION,
        "model_fingerprint": profile.model_fingerprint,
        "sequence": profile.sequence,
        "precision": profile.precision,
        "spread": profile.spread,
    }
    text = io.StringIO()
    text.write(f"# {json.dumps(head, sort_keys=True)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PROFILE_COLUMNS)
    writer.writerows(astuple(timing) for timing in profile.timings)
    path = _profile_path(profile.model_fingerprint, devices[0], profile.sequence, profile.precision, home)
    return write_measurement(path, text.getvalue())


def add_profile(profile: LayerProfile, home: Path) -> Path:
    """Write a profile with a readable older one's rows of other tensor degrees; return the path.

    Raises:
        InputError: as `save_profile` does.
    """
    device = next((timing.device for timing in profile.timings), "")
    try:
        older = load_profile(profile.model_fingerprint, device, profile.sequence, profile.precision, home)
    except InputError:
        # The message of `_read` names a new measurement as the remedy.
        older = None
    return save_profile(profile if older is None else older.renewed(profile), home)


def load_profile(
    model_fingerprint: str, device: str, sequence: int, precision: str, home: Path
) -> LayerProfile | None:
    """Read the profile of a model's layers on a device, or return None when it was never taken.

    Raises:
        InputError: when the file is broken.
    """
    return _read(_profile_path(model_fingerprint, device, sequence, precision, home), _profile_from)


def load_profiles(
    model_fingerprint: str, devices: Sequence[str], sequence: int, precision: str, home: Path
) -> LayerProfile | None:
    """Read and merge the profiles of a model's layers on several kinds of devices; None without any.

    Raises:
        InputError: when a file is broken.
    """
    loaded = (load_profile(model_fingerprint, device, sequence, precision, home) for device in devices)
    found = [profile for profile in loaded if profile is not None]
    if not found:
        return None
    timings = tuple(timing for profile in found for timing in profile.timings)
    return replace(found[0], timings=timings, spread=max(profile.spread for profile in found))


def save_cluster(cluster: Cluster, home: Path) -> Path:
    """Write a cluster with measured links as a CLUSTER.toml; return the path.

    Raises:
        InputError: when the file cannot be written.
    """
    return write_measurement(home / FOLDER / f"cluster-{file_name(cluster.name)}.toml", to_toml(cluster))


def profile_from_record(record: Mapping[str, Any]) -> LayerProfile:
    """Return a profile from a record of `dataclasses.asdict`."""
    timings = tuple(LayerTiming(**timing) for timing in record["timings"])
    return LayerProfile(**{**record, "timings": timings})


def load_profile_file(path: Path) -> LayerProfile:
    """Read a profile from any file.

    Raises:
        InputError: when the file cannot be read or is not a profile.
    """
    profile = _read(path, _profile_from)
    if profile is None:
        raise InputError(Violation(str(path), "no such file"))
    return profile


def _machine_path(device: str, home: Path) -> Path:
    return home / FOLDER / f"machine-{file_name(device)}.json"


def _profile_path(fingerprint: str, device: str, sequence: int, precision: str, home: Path) -> Path:
    return home / FOLDER / f"profile-{fingerprint}-s{sequence}-{precision}-{file_name(device)}.csv"


def file_name(name: str) -> str:
    """Return a name that is valid for a file: `name` itself, or a substitute with a hash of it."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def write_measurement(path: Path, text: str) -> Path:
    """Write a file of `WEFT_HOME` whole; return its path.

    Raises:
        InputError: when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(Violation(str(path), f"cannot be written: {error.strerror}")) from None
    return path


def _read(path: Path, parse: Callable[[str], Measured]) -> Measured | None:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(Violation(str(path), f"cannot be read: {error.strerror}")) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        problem = f"is not a measurement ({reason}); delete it or run weft measure again"
        raise InputError(Violation(str(path), problem)) from None


def _machine_from(text: str) -> MachineMeasurement:
    record: dict[str, Any] = json.loads(text)
    _require_version(record)
    if "compute_slowdown" not in record:
        # The only factor in older files is that of computations, under the other's name.
        record["compute_slowdown"] = record["communication_slowdown"]
        record["communication_slowdown"] = 1.0
    return MachineMeasurement(
        device=str(record["device"]),
        matmul={str(name): _table(rows, least=1) for name, rows in record["matmul"].items()},
        memory=_table(record["memory"], least=1),
        launch_s=_number(record["launch_s"]),
        instruction_s=_number(record["instruction_s"]),
        compute_slowdown=max(1.0, _number(record["compute_slowdown"])),
        communication_slowdown=max(1.0, _number(record["communication_slowdown"])),
        # One rank alone has no peer to measure messages with.
        message=_table(record["message"], least=0, from_zero=True),
        collectives=_collectives(record),
        spread=_number(record["spread"]),
        encode=_table(record.get("encode", []), least=0),
        decode=_table(record.get("decode", []), least=0),
    )


def _collectives(record: dict[str, Any]) -> dict[str, dict[int, tuple[tuple[float, float], ...]]]:
    """Return the tables of collectives; older files have one, of an all-reduce of two ranks."""
    older = {"all_reduce": {2: record["all_reduce"]}} if record.get("all_reduce") else {}
    found = {
        str(name): {int(ranks): _table(rows, least=1, from_zero=True) for ranks, rows in tables.items()}
        for name, tables in record.get("collectives", older).items()
    }
    if not found.keys() <= set(COLLECTIVES) or any(min(tables, default=2) < 2 for tables in found.values()):
        raise ValueError(f"collectives are {', '.join(COLLECTIVES)}, of two ranks or more")
    return found


def _profile_from(text: str) -> LayerProfile:
    head: dict[str, Any] = {"model_fingerprint": "", "sequence": 0, "precision": "", "spread": 0.0}
    if text.startswith("#"):
        first, _, text = text.partition("\n")
        head = json.loads(first.removeprefix("#"))
        _require_version(head)
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    if not set(PROFILE_COLUMNS) <= set(reader.fieldnames or ()):
        raise ValueError(f"columns must be {','.join(PROFILE_COLUMNS)}")
    timings = tuple(_timing([row[column] or "" for column in PROFILE_COLUMNS]) for row in reader)
    if not timings:
        raise ValueError("no rows")
    return LayerProfile(
        model_fingerprint=str(head["model_fingerprint"]),
        sequence=int(head["sequence"]),
        precision=str(head["precision"]),
        timings=timings,
        spread=_number(head["spread"]),
    )


def _timing(row: Sequence[str]) -> LayerTiming:
    device, layer, tp, size, forward, backward, update, kept = row
    timing = LayerTiming(
        device=canonical_name(device),
        layer=layer,
        tp=int(tp),
        micro_batch_size=int(size),
        forward_s=_number(forward),
        backward_s=_number(backward),
        update_s=_number(update),
        activation_bytes=round(_number(kept)),
    )
    if min(timing.tp, timing.micro_batch_size) < 1 or timing.activation_bytes < 0:
        raise ValueError(f"counts out of range in row {','.join(row)}")
    return timing


def _require_version(record: dict[str, Any]) -> None:
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']} is not {VERSION}")


def _table(
    rows: Sequence[Sequence[Any]], *, least: int, from_zero: bool = False
) -> tuple[tuple[float, float], ...]:
    """Return (size, value) pairs; raise ValueError unless sizes rise and values are positive."""
    table = tuple((_number(size), _number(value)) for size, value in rows)
    sizes = [size for size, _ in table]
    if len(table) < least or sizes != sorted(set(sizes)) or any(value == 0.0 for _, value in table):
        raise ValueError("a table must rise in size and hold positive values")
    if sizes and sizes[0] == 0.0 and not from_zero:
        raise ValueError("a table of speeds cannot start at size 0")
    return table


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0.0:
        raise ValueError(f"{value} is not a finite number of at least 0")
    return number
