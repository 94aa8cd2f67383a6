"""The input files of Metis: hosts, their devices and links, and profiles of layers, in its own words.

Metis (Um et al., USENIX ATC 2024) reads profiles by kind of device, tensor degree and number of
samples. A profile has each layer's memory, and its milliseconds forward and backward with the exchanges
between tensor ranks. The figures are those of weft's cost model (measured layers, else data sheets).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.describe.amount import Shape
from weft.describe.cluster import NodeGroup
from weft.errors import InputError, Violation
from weft.planning.planners.layer_times import ProblemLayerTimes
from weft.planning.problem import Problem
from weft.predict.cost.memory import stage_kept_bytes, state_bytes

# Its names for kinds of devices mean nothing to it: speeds come from the profiles.
LABELS = ("A100", "V100", "P100", "T4")
# Its file of hosts has one digit for the devices of a node.
_MOST_DEVICES = 9
# It adds milliseconds to bytes over 2^20 times a bandwidth: in this unit the second are milliseconds, too.
_BANDWIDTH_UNIT = 1000 * 2**20
# Between a step's last forward and its first backward pass; it drops plans where there is nothing at all.
_BETWEEN_PASSES_MS = 1e-3


@dataclass(frozen=True, kw_only=True)
class MetisInputs:
    """A problem in Metis' words.

    Attributes:
        problem: what is planned.
        most_samples: of one micro-batch of one replica.
    """

    problem: Problem
    most_samples: int = 16

    def __post_init__(self) -> None:
        problems = list(_refusals(self.problem))
        if problems:
            raise InputError([Violation("metis", problem) for problem in problems])

    @cached_property
    def labels(self) -> Mapping[str, str]:
        """Metis' name for each kind of device: its own where it has one, else one that is left."""
        kinds = list(dict.fromkeys(group.device.name for group in self.problem.job.cluster.groups))
        own = {kind: kind.split("-")[0].upper() for kind in kinds}
        known = {kind: label for kind, label in own.items() if label in LABELS}
        taken: dict[str, str] = {}
        for kind in kinds:
            mine = known.get(kind)
            others = [label for label in LABELS if label not in (*taken.values(), *known.values())]
            taken[kind] = mine if mine is not None and mine not in taken.values() else others[0]
        return taken

    @property
    def most_tensor_ranks(self) -> int:
        """The largest power of two up to a node for which the model can be divided by all of them."""
        job, degree = self.problem.job, 1
        devices = min(group.devices for group in job.cluster.groups)
        while devices % (2 * degree) == 0 and job.graph.refuse_tensor(2 * degree) is None:
            degree *= 2
        return degree

    @property
    def samples(self) -> list[int]:
        """Samples of a micro-batch that its search may ask for.

        Equal replicas have the first; unequal ones are put together from powers of two.
        """
        job = self.problem.job
        replicas = [2**power for power in range(job.cluster.ranks.bit_length())]
        batches = [count for count in range(1, job.global_batch + 1) if job.global_batch % count == 0]
        equal = {job.global_batch // batch // count for batch in batches for count in replicas}
        powers = {2**power for power in range(job.global_batch.bit_length())}
        return sorted(size for size in equal if 1 <= size <= self.most_samples) + sorted(
            size for size in powers if size > self.most_samples or size not in equal
        )

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of its command line."""
        job, model = self.problem.job, self.problem.model
        options = {
            "model_name": "GPT",
            "num_layers": len(job.graph.layers),
            "gbs": job.global_batch,
            "hidden_size": model.hidden,
            "sequence_length": job.sequence,
            "vocab_size": max(1, model.vocabulary),
            "attention_head_size": max(1, model.heads),
            "hostfile_path": folder / "hostfile",
            "clusterfile_path": folder / "clusterfile.json",
            "profile_data_path": folder / "profile",
            "max_profiled_tp_degree": self.most_tensor_ranks,
            "max_profiled_batch_size": self.most_samples,
            # As in the example of its authors.
            "min_group_scale_variance": 1,
            "max_permute_len": 4,
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def write(self, folder: Path) -> None:
        """Write all files.

        Raises:
            InputError: when the layer profile of the problem does not cover what Metis asks for.
        """
        hosts, nodes = self.nodes()
        (folder / "hostfile").write_text(hosts, encoding="utf-8")
        (folder / "clusterfile.json").write_text(json.dumps(nodes, indent=1), encoding="utf-8")
        (folder / "profile").mkdir()
        for name, record in self.profiles():
            (folder / "profile" / name).write_text(json.dumps(record), encoding="utf-8")

    def nodes(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """Its file of hosts, and what it is told of each: GB of 2^30 bytes, bandwidths in its unit."""
        cluster = self.problem.job.cluster
        lines: list[str] = []
        nodes: dict[str, dict[str, Any]] = {}
        for group in cluster.groups:
            # Of two nodes it takes the slower one's.
            between = [link.bytes_per_s for pair, link in cluster.links.items() if group.name in pair]
            for _ in range(group.count):
                host = f"node{len(nodes)}"
                lines.append(f"{host} slots={group.devices}\n")
                nodes[host] = {
                    "instance_type": self.labels[group.device.name],
                    "inter_bandwidth": max(between, default=group.link.bytes_per_s) / _BANDWIDTH_UNIT,
                    "intra_bandwidth": group.link.bytes_per_s / _BANDWIDTH_UNIT,
                    "memory": group.device.memory_bytes / 2**30,
                }
        return "".join(lines), nodes

    def profiles(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name of a file, what is in it) for each kind of device, tensor degree and number of samples."""
        times = ProblemLayerTimes(self.problem)
        places: dict[str, int] = {}
        for place, group in enumerate(self.problem.job.cluster.groups):
            places.setdefault(group.device.name, place)
        degrees = [2**power for power in range(self.most_tensor_ranks.bit_length())]
        for kind, place in places.items():
            for degree in degrees:
                for size in self.samples:
                    name = f"DeviceType.{self.labels[kind]}_tp{degree}_bs{size}.json"
                    yield name, self._profile(times, place, degree, size)

    def _profile(self, times: ProblemLayerTimes, place: int, degree: int, size: int) -> dict[str, Any]:
        job = self.problem.job
        layers = range(len(job.graph.layers))
        both_ms = (1e3 * times.of_group(place, size, degree).both_s).tolist()
        shape = Shape(size, job.sequence, degree)
        states = state_bytes(job.precision, job.optimizer)
        memory = [
            (
                states.total * job.graph.layers[layer].parameters(shape)
                + stage_kept_bytes(job.graph, (layer,), shape, job.precision)
            )
            / 2**20
            for layer in layers
        ]
        gradients = self._gradient_bytes
        step_ms = sum(both_ms) + _BETWEEN_PASSES_MS
        return {
            "model": {
                "model_name": job.graph.name,
                "num_layers": len(layers),
                "parameters": {
                    "total_parameters_bytes": sum(gradients),
                    "parameters_per_layer_bytes": gradients,
                    "activation_parameters_bytes": [],
                },
            },
            "execution_time": {
                "total_time_ms": step_ms + self._update_ms,
                "forward_backward_time_ms": step_ms,
                "batch_generator_time_ms": 0.0,
                "layernorm_grads_all_reduce_time_ms": 0.0,
                "embedding_grads_all_reduce_time_ms": 0.0,
                "optimizer_time_ms": self._update_ms,
                "layer_compute_total_ms": both_ms,
            },
            "execution_memory": {"total_memory_mb": sum(memory), "layer_memory_total_mb": memory},
        }

    # It takes these two from whichever file the folder lists first, and divides by tensor ranks itself: they
    # are the same in all files.

    @cached_property
    def _gradient_bytes(self) -> list[int]:
        """Bytes of each layer that replicas add up, without tensor ranks; it takes parameters for them."""
        job = self.problem.job
        shape = Shape(1, job.sequence)
        each = state_bytes(job.precision).gradients
        return [round(each * layer.parameters(shape)) for layer in job.graph.layers]

    @cached_property
    def _update_ms(self) -> float:
        """An update of the whole model on the slowest kind of device."""
        job, compute = self.problem.job, self.problem.cost_model.compute
        layers, shape = range(len(job.graph.layers)), Shape(1, job.sequence)
        return max(
            1e3
            * compute.stage_times(
                job.graph, layers, shape, job.precision, group.device, optimizer=job.optimizer
            ).update_s
            for group in job.cluster.groups
        )


def _refusals(problem: Problem) -> Iterator[str]:
    """Yield the reasons why Metis' program cannot plan a problem."""
    job, pins = problem.job, problem.pins
    groups: tuple[NodeGroup, ...] = job.cluster.groups
    kinds = [layer.kind for layer in job.graph.layers]
    if not job.graph.is_chain or len(kinds) < 3 or len(set(kinds[1:-1])) > 1:
        yield "it knows a chain of equal layers between a first and a last one"
    if len({group.devices for group in groups}) > 1 or groups[0].devices > _MOST_DEVICES:
        sizes = " and ".join(str(size) for size in sorted({group.devices for group in groups}))
        yield f"its nodes have equally many devices, {_MOST_DEVICES} at most, not {sizes}"
    if job.cluster.ranks & (job.cluster.ranks - 1):
        yield f"its devices are a power of two together, not {job.cluster.ranks}"
    names = dict.fromkeys(group.device.name for group in groups)
    if len(names) > len(LABELS):
        yield f"it tells {len(LABELS)} kinds of devices apart, not {len(names)}"
    if any(len(set(group.speeds)) > 1 or set(group.speeds) - {1.0} for group in groups):
        yield "its devices of one kind are equally fast"
    if pins.sharding not in (None, "zero-0"):
        yield f"its replicas share nothing out, and {pins.sharding} is pinned"
    if pins.recompute not in (None, "none"):
        yield f"it recomputes nothing, and {pins.recompute} is pinned"
