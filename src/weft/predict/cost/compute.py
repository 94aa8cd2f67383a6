"""Times of stages: from a layer profile, else from the measured machine, else from the data sheet.

A pass takes its matmuls at the speed for their size, plus its memory-bound kernels at the speed for theirs.
On a synchronous device the launches add to the time. An asynchronous device is never faster than the host
that issues its kernels (`weft.predict.cost.host_launches`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_graph import LayerGraph
from weft.describe.layer_pieces import LayerPiece, cut_of
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.plan import Launch, Recompute
from weft.predict.corrections import Correction
from weft.predict.cost.hidden_matrices import orthogonalise_s
from weft.predict.cost.host_launches import HALF_WIDTH, LAUNCH_PARTS, pace
from weft.predict.cost.keeping import keeping_of
from weft.predict.cost.layer_times import (
    DataSheetSpeeds,
    LayerTimes,
    MeasuredSpeeds,
    Speeds,
    pass_s,
    piece_times,
    roofline,
)
from weft.predict.cost.memory import (
    STEPPED_BYTES,
    context_kept,
    copied_parameters,
    stage_input_bytes,
    stage_kept_bytes,
    stage_product_bytes,
    state_bytes,
    waiting_gradients,
)
from weft.predict.cost.profiled import (
    Distance,
    how_measured,
    profiled_kept_bytes,
    profiled_times,
    require_same_model,
)
from weft.predict.profile import LayerProfile, MachineMeasurement

# Relative half-widths of the 90 % interval. Data sheets say nothing about a machine's clocks, libraries and
# neighbours; a measured machine says nothing about a model's own kernels; between a profile and a run a
# machine drifts (up to 8 % where docs/benchmarks.md was measured).
DATA_SHEET_HALF_WIDTH = 0.30
MACHINE_HALF_WIDTH = 0.15
PROFILE_HALF_WIDTH = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage: one micro-batch, the optimizer's update, and one read of the gradients.

    `update_s` and `read_gradients_s` cover the parameters that one rank steps. `issue_s` are those of a host
    that issues the kernels of a micro-batch's passes; 0 where the times contain them. `half_width` is the
    relative half-width of the 90 % interval; `source` names the origin of the times.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    update_s: float
    read_gradients_s: float
    half_width: float
    source: str
    issue_s: float = 0.0

    @property
    def passes_s(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s

    def issued(self, exchanged_s: float) -> StageTimes:
        """Return the times beside exchanges with other ranks of so many seconds, on a device that waits for
        its host.

        The half-width reaches to the longer of both at the upper ends of their own intervals.
        """
        needed_s, latest_s = self.passes_s + exchanged_s, self.issue_s * (1.0 + HALF_WIDTH)
        if latest_s <= needed_s * (1.0 + self.half_width):
            return self
        factor = pace(self.passes_s, exchanged_s, self.issue_s)
        return replace(
            self,
            forward_s=factor * self.forward_s,
            backward_input_s=factor * self.backward_input_s,
            backward_weight_s=factor * self.backward_weight_s,
            half_width=latest_s / max(needed_s, self.issue_s) - 1.0,
        )


@dataclass(frozen=True, kw_only=True)
class ComputeModel:
    """Sources of compute times; each device uses the best source that covers it.

    A profile covers the devices it names. A machine measurement covers its device in the measured precisions.
    A correction multiplies all times of its devices, from any source.
    """

    machine: MachineMeasurement | None = None
    profile: LayerProfile | None = None
    correction: Correction | None = None
    _known: dict[tuple[Hashable, ...], tuple[LayerTimes, Layer, Device]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def stage_times(
        self,
        graph: LayerGraph,
        layers: Sequence[int],
        shape: Shape,
        precision: str,
        device: Device,
        *,
        recompute: Recompute = "none",
        update_share: float = 1.0,
        optimizer: OptimizerWork = ADAMW,
        launch: Launch = "eager",
    ) -> StageTimes:
        """Return the times of the layers at positions `layers`, run in sequence as one stage.

        With `recompute`, the input part of the backward pass begins with the forward pass of the same layers.
        Selective recomputation leaves out its products. `update_share` is the part of the stage's parameters
        that one rank steps, with `optimizer`. `launch` is the way in which its host issues kernels.

        Raises:
            InputError: when the device lacks the precision, or its profile has another model, sequence,
                precision or tensor degrees.
        """
        work = StageWork(self, graph, layers, shape, precision, device)
        total, source, half_width = work.total(optimizer)
        again_s = keeping_of(recompute).again_s(replace(work, forward_s=total.forward_s))
        forwards = 1.0 + (again_s / total.forward_s if total.forward_s else 0.0)
        factor = self._factor(device)
        return StageTimes(
            forward_s=total.forward_s * factor,
            backward_input_s=(total.backward_input_s + again_s) * factor,
            backward_weight_s=total.backward_weight_s * factor,
            update_s=total.update_s * update_share * factor,
            read_gradients_s=work.read_gradients_s * update_share * factor,
            half_width=half_width,
            source=source,
            issue_s=(forwards * total.issue_forward_s + total.issue_backward_s)
            * LAUNCH_PARTS[launch]
            * factor,
        )

    def piece_times(
        self,
        graph: LayerGraph,
        layers: Sequence[int],
        shape: Shape,
        precision: str,
        device: Device,
        pieces_of: Callable[[Layer], Sequence[LayerPiece]] = lambda layer: cut_of(layer).pieces,
    ) -> list[LayerTimes]:
        """Return the times of a stage's computations between exchanges, by the speeds.

        The end of one layer and the beginning of the next are one piece. By default, tensor ranks exchange.
        """
        speeds = self._speeds(device, precision)[0]
        known: dict[int, list[LayerTimes]] = {}
        found = [LayerTimes()]
        for layer in layers:
            alike = graph.alike[layer]
            if alike not in known:
                pieces = pieces_of(graph.layers[layer])
                known[alike] = [piece_times(one, shape, precision, device, speeds) for one in pieces]
            first, *others = known[alike]
            found[-1] = found[-1].plus(first, 1)
            found += others
        return found

    def work_s(self, work: PassWork, shape: Shape, precision: str, device: Device) -> float:
        """Return the seconds of work beside a stage's passes, by the speeds of its kernels.

        Raises:
            InputError: when the device lacks the precision.
        """
        speeds = self._speeds(device, precision)[0]
        seconds = max(pass_s(work, shape, precision, device, speeds), work.kernels * speeds.launch_s)
        return seconds * self._factor(device)

    def kept_bytes(
        self,
        graph: LayerGraph,
        layers: Sequence[int],
        shape: Shape,
        precision: str,
        device: Device,
        recompute: Recompute = "none",
    ) -> int:
        """Return bytes that one micro-batch leaves in a stage from its forward to its backward pass.

        Raises:
            InputError: as `stage_times` does.
        """
        return round(keeping_of(recompute).left(StageWork(self, graph, layers, shape, precision, device)))

    def taken_bytes(
        self,
        graph: LayerGraph,
        layers: Sequence[int],
        shape: Shape,
        precision: str,
        device: Device,
        recompute: Recompute = "none",
    ) -> int:
        """Return the most bytes that a stage's backward pass takes beside those that its forward pass left.

        It goes from layer to layer, and frees what each of them has left. Gradients of weights that several
        layers use wait for the first of these layers.

        Raises:
            InputError: as `stage_times` does.
        """
        keeping, most, freed = keeping_of(recompute), 0.0, 0.0
        # They wait in the precision in which they are added up.
        element, waiting = STEPPED_BYTES[precision], waiting_gradients(graph, layers, shape)
        # Of equal layers in a row, the last one needs most.
        for _, equal in groupby(reversed(layers), key=lambda layer: graph.alike[layer]):
            run = tuple(equal)
            last = StageWork(self, graph, run[:1], shape, precision, device)
            most = max(most, keeping.taken(last) - freed)
            freed += len(run) * keeping.left(last) - element * sum(waiting.get(layer, 0.0) for layer in run)
        return round(most)

    def instruction_s(self, device: Device) -> float:
        """Return the measured host time that the executor adds to every compute instruction, else 0."""
        machine = self.measured(device)
        return 0.0 if machine is None else machine.instruction_s * self._factor(device)

    def slowdowns(self, device: Device) -> tuple[float, float]:
        """Return factors (computation, transfer) of their times while they overlap; 1 if not measured."""
        machine = self.measured(device)
        return (1.0, 1.0) if machine is None else (machine.compute_slowdown, machine.communication_slowdown)

    def source_of(self, device: Device, precision: str) -> str:
        """Return the source of the device's times, before any correction."""
        return "layer profile" if self._profiles(device) else self._speeds(device, precision)[1]

    def _factor(self, device: Device) -> float:
        return self.correction.computations(device.name) if self.correction is not None else 1.0

    def measured(self, device: Device) -> MachineMeasurement | None:
        """Return the measurements of this kind of device, if there are any."""
        machine = self.machine
        return machine if machine is not None and machine.device == device.name else None

    def _profiles(self, device: Device) -> bool:
        return self.profile is not None and any(
            timing.device == device.name for timing in self.profile.timings
        )

    def _speeds(self, device: Device, precision: str) -> tuple[Speeds, str, float]:
        machine = self.measured(device)
        if machine is not None and precision in machine.matmul:
            half_width = max(MACHINE_HALF_WIDTH, machine.spread)
            return MeasuredSpeeds(machine, device), "measured machine", half_width
        return DataSheetSpeeds(device), "data sheet", DATA_SHEET_HALF_WIDTH

    def _distinct(self, graph: LayerGraph, layers: Sequence[int]) -> Iterator[tuple[Layer, int]]:
        """Yield each kind of work once, with its count.

        Equal layers of one family share their passes, and comparing identities is far cheaper than comparing
        amounts. Equal layers without shared passes are only evaluated more than once. A profile may know
        layers by their names.
        """
        counts: dict[tuple[Hashable, ...], tuple[Layer, int]] = {}
        for index in layers:
            layer = graph.layers[index]
            parts = (layer.parameters, layer.forward, layer.backward_input, layer.backward_weight)
            key = (*(id(part) for part in parts), layer.name if layer.name in self._named else "")
            counts[key] = (layer, counts.get(key, (layer, 0))[1] + 1)
        yield from counts.values()

    @cached_property
    def _named(self) -> frozenset[str]:
        timings = self.profile.timings if self.profile is not None else ()
        return frozenset(timing.layer for timing in timings)

    def contains_exchanges(self, device: Device, shape: Shape) -> bool:
        """Return True if the device's times contain its tensor ranks' exchanges, as profiles do."""
        return shape.tensor_parallel > 1 and self._profiles(device)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Bytes and seconds of one micro-batch in a stage, as `Kept` and `Timed`, computed on demand."""

    model: ComputeModel
    graph: LayerGraph
    layers: Sequence[int]
    shape: Shape
    precision: str
    device: Device
    forward_s: float = 0.0

    @property
    def kept(self) -> int:
        """Bytes of everything that backward passes of the layers need."""
        profile, graph, shape, precision = self.model.profile, self.graph, self.shape, self.precision
        if profile is None or not self.model._profiles(self.device):
            return stage_kept_bytes(graph, self.layers, shape, precision)
        require_same_model(profile, graph, shape, precision)
        kept = 0.0
        for layer, count in self._distinct:
            kept += count * profiled_kept_bytes(profile, layer, shape, self.device.name)
        more = sum(context_kept(graph.layers[layer], shape) for layer in self.layers)
        return round(shape.own_part(kept) + more * PRECISION_BYTES[precision])

    @property
    def inputs(self) -> float:
        return stage_input_bytes(self.graph, self.layers, self.shape, self.precision)

    @property
    def products(self) -> float:
        return stage_product_bytes(self.graph, self.layers, self.shape, self.precision)

    @property
    def freed_products(self) -> float:
        each = self.graph.amounts("freed_products", self.shape)
        return sum(each[layer] for layer in self.layers) * PRECISION_BYTES[self.precision]

    @property
    def temporaries(self) -> float:
        """Bytes of the largest temporaries of a layer."""
        return self._largest(later=False)

    @property
    def later_temporaries(self) -> float:
        return self._largest(later=True)

    def _largest(self, *, later: bool) -> float:
        sizes = PRECISION_BYTES[self.precision], STEPPED_BYTES[self.precision]
        each = self.graph.temporary_bytes(self.shape, *sizes, later=later)
        return max(each[layer] for layer in self.layers)

    @property
    def without_products_s(self) -> float:
        """Seconds of a selective recomputation: usually the forward pass without its products.

        A profile has the time of a whole pass only. The recomputed part takes its share of it by the speeds.
        """
        asked, total = (self.shape, self.precision, self.device, self._speeds), 0.0
        for layer, count in self._distinct:
            work = layer.forward
            again = layer.again or PassWork(memory=work.memory, kernels=work.kernels - len(work.matmuls))
            seconds = pass_s(again, *asked)
            if self.model._profiles(self.device) and seconds:
                seconds *= self._measured(layer).forward_s / pass_s(work, *asked)
            total += count * seconds
        return total

    @property
    def read_gradients_s(self) -> float:
        each = self.graph.amounts("parameters", self.shape)
        parameters = sum(each[layer] for layer in self.layers)
        return self._speeds.memory_s(parameters * state_bytes(self.precision).gradients)

    def total(self, optimizer: OptimizerWork) -> tuple[LayerTimes, str, float]:
        """Return the sum over layers and copied parameters, its source and half-width."""
        profile = self.model.profile
        if profile is not None and self.model._profiles(self.device):
            return self._profiled(profile, optimizer)
        total, speeds = LayerTimes(), self._speeds
        for layer, count in self._distinct:
            total = total.plus(self._by_speeds(layer, optimizer), count)
        for tied in copied_parameters(self.graph, self.layers):
            touched = tied.parameters(self.shape) * state_bytes(self.precision, optimizer).touched
            total = total.plus(LayerTimes(update_s=speeds.memory_s(touched)), 1)
        return total, *self.model._speeds(self.device, self.precision)[1:]

    def _by_speeds(self, layer: Layer, optimizer: OptimizerWork) -> LayerTimes:
        known, key = self.model._known, (layer.parts, id(self.device), self.shape, self.precision, optimizer)
        if key not in known:
            # The held objects stay alive, so that no other object gets their identity.
            asked = self.shape, self.precision, self.device, self._speeds
            known[key] = roofline(layer, *asked, optimizer), layer, self.device
        return known[key][0]

    def _profiled(self, profile: LayerProfile, optimizer: OptimizerWork) -> tuple[LayerTimes, str, float]:
        """Return the sum by a profile; its updates, measured with AdamW, scale with touched bytes.

        Orthogonalisations of matrices are added, by the speeds.
        """
        require_same_model(profile, self.graph, self.shape, self.precision)
        total, distance = LayerTimes(), Distance()
        for layer, count in self._distinct:
            total = total.plus(self._measured(layer), count)
            distance = max(distance, how_measured(profile, layer, self.shape, self.device.name))
        trained = (one for one in copied_parameters(self.graph, self.layers) if one.parameters.terms)
        for tied in trained:
            owner = self.graph.layers[tied.layers[0]]
            copied = tied.parameters(self.shape) / owner.parameters(self.shape)
            total = total.plus(LayerTimes(update_s=copied * self._measured(owner).update_s), 1)
        touched = state_bytes(self.precision, optimizer).touched / state_bytes(self.precision).touched
        iterated_s = sum(
            count * orthogonalise_s(layer, self.shape, self.precision, self.device, self._speeds, optimizer)
            for layer, count in self._distinct
        )
        half_width = max(PROFILE_HALF_WIDTH, profile.spread) + distance.half_width
        update_s = total.update_s * touched + iterated_s
        return replace(total, update_s=update_s), distance.source, half_width

    def _measured(self, layer: Layer) -> LayerTimes:
        assert self.model.profile is not None, "the device is profiled"
        asked = self.shape, self.precision, self.device, self._speeds
        return profiled_times(self.model.profile, layer, *asked)

    @property
    def _speeds(self) -> Speeds:
        return self.model._speeds(self.device, self.precision)[0]

    @property
    def _distinct(self) -> Iterator[tuple[Layer, int]]:
        return self.model._distinct(self.graph, self.layers)
