"""Optimizer states and activations that a rank moves to host memory and back.

The states of an optimizer are host tensors between steps, so that a checkpoint reads them where they are.
Activations are what autograd saves in a forward pass. Their storages move, each once, and a backward pass
finds the same views of new ones. Weights, and the inputs and outputs of a stage, have other owners and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from weft.errors import RunError
from weft.methods.offload.kinds import STORE_ACTIVATIONS, Offloads
from weft.methods.offload.options import NAME
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import SAVED, WEIGHTS, Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf, StepGate
from weft.run.resources import Resources
from weft.run.stage.stage_pass import Outputs, StagePass
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.workspace import Workspace

# Values of a stage and a micro-batch, or of a stage's states: the end of the copy to the host, memory for the
# copy back, and its end.
STORED, ROOM, LOADED = "stored_in_host", "room_for_load", "loaded_from_host"


def on_host(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor in host memory, pinned if a device copies to it."""
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type != "cpu")


class OffloadedStates:
    """The states of one optimizer. Its `state` has the host's tensors, or the device's around a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._room: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []

    def store(self) -> None:
        """Copy all states to the host; their memory stays until `release`."""
        for parameter, state in self._optimizer.state.items():
            for leaf, value in state.items():
                key = parameter, leaf
                if value is self._host.get(key) or not _moves(parameter, value):
                    continue
                if key not in self._host:
                    self._host[key] = on_host(value)
                state[leaf] = self._host[key].copy_(value, non_blocking=True)
                self._leaving.append(value)

    def release(self) -> None:
        """Free the device's memory. States from a checkpoint have never left it, and do so now."""
        self.store()
        self._leaving.clear()

    def take_room(self) -> None:
        self._room = {
            key: torch.empty_like(host, device=key[0].device, pin_memory=False)
            for key, host in self._host.items()
        }

    def load(self) -> None:
        for (parameter, leaf), value in self._room.items():
            self._optimizer.state[parameter][leaf] = value.copy_(
                self._host[parameter, leaf], non_blocking=True
            )
        self._room = {}


def _moves(parameter: torch.Tensor, value: object) -> bool:
    """Return True for a state beside its parameter; counts of steps stay, wherever they are."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.device == parameter.device


class MovedStorage:
    """The memory under tensors that autograd has saved; None while it is in host memory alone."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device, self.bytes = storage.device, storage.nbytes()
        self._host: torch.Tensor | None = None
        self.storage: torch.UntypedStorage | None = storage

    def store(self) -> None:
        flat = self._flat()
        self._host = on_host(flat).copy_(flat, non_blocking=True)

    def release(self) -> None:
        self.storage = None

    def take_room(self) -> None:
        self.storage = torch.empty(self.bytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def load(self) -> None:
        assert self._host is not None, "a load follows its store"
        self._flat().copy_(self._host, non_blocking=True)
        self._host = None

    def _flat(self) -> torch.Tensor:
        assert self.storage is not None, "a copy needs memory on the device"
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(self.storage)


@dataclass(frozen=True, slots=True)
class SavedView:
    """One tensor that autograd has saved, as a view of moved memory."""

    moved: MovedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        storage = self.moved.storage
        if storage is None:
            raise RunError("a backward pass needs activations that are in host memory")
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.size, self.stride)


class MovedActivations:
    """The storages that a forward pass of one micro-batch has saved, without those that stay."""

    def __init__(self, staying: Iterable[torch.Tensor]) -> None:
        self._staying = {_address(one) for one in staying}
        self._moved: dict[int, MovedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        address = _address(tensor)
        if address in self._staying or tensor.layout is not torch.strided:
            return tensor
        moved = self._moved.setdefault(address, MovedStorage(tensor.untyped_storage()))
        return SavedView(moved, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def keep(self, outputs: Iterable[torch.Tensor]) -> None:
        """Let the outputs of the pass stay: others read them."""
        for one in outputs:
            self._moved.pop(_address(one), None)

    @property
    def storages(self) -> Sequence[MovedStorage]:
        return tuple(self._moved.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unpack(saved: torch.Tensor | SavedView) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, SavedView) else saved


class Offload(MethodState):
    """The moved states and activations of one rank."""

    def __init__(self, making: Making) -> None:
        owed, columns = making.program.obligations.methods[NAME], making.program.columns
        assert isinstance(owed, Offloads), "the program owes it"
        self._owed, self._stages = owed, making.stages
        stores = columns.kind == STORE_ACTIVATIONS
        self._leaving = set(zip(columns.stage[stores], columns.micro_batch[stores], strict=True))
        self.states: dict[int, OffloadedStates] = {}
        self.activations: dict[tuple[int, int], MovedActivations] = {}

    def begin(self, resources: Resources) -> None:
        self.states = {
            stage: OffloadedStates(optimizer)
            for stage, optimizer in resources.optimizers.items()
            if stage in self._owed.states
        }

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        return StatesLoaded(workspace, stage) if stage in self.states else None

    def around_forward(self, stage: int, micro_batch: int, run: StagePass) -> StagePass:
        if (stage, micro_batch) not in self._leaving:
            return run
        module = self._stages[stage]

        def run_and_move(inputs: Sequence[torch.Tensor], targets: torch.Tensor | None, step: int) -> Outputs:
            others = () if targets is None else (targets,)
            moved = MovedActivations((*module.parameters(), *module.buffers(), *inputs, *others))
            with saved_tensors_hooks(moved.pack, unpack):
                outputs = run(inputs, targets, step)
            moved.keep(outputs)
            self.activations[stage, micro_batch] = moved
            return outputs

        return run_and_move

    def moved(self, stage: int, micro_batch: int) -> Sequence[MovedStorage | OffloadedStates]:
        """Return the moved memory of a stage's states, or of a micro-batch's activations."""
        if micro_batch == NONE:
            return (self.states[stage],)
        return self.activations[stage, micro_batch].storages

    def work_of(
        self, instruction: Instruction, do: Callable[[MovedStorage | OffloadedStates], None]
    ) -> Callable[[], None]:
        """Return the work of an instruction, which does the same to all memory that it moves."""

        def work() -> None:
            for one in self.moved(instruction.stage, instruction.micro_batch):
                do(one)

        return work


class StatesLoaded(StepGate):
    """A step waits for its states."""

    def __init__(self, workspace: Workspace, stage: int) -> None:
        self._workspace, self._stage = workspace, stage

    def reads(self) -> tuple[Value[None], ...]:
        return (self._workspace.latest(LOADED, self._stage),)

    def votes(self, *values: Value[None]) -> None:
        """Admit every step."""

    def stepped(self) -> None:
        """Do nothing: the store follows."""


def _state(workspace: Workspace) -> Offload:
    state = workspace.resources.methods[NAME]
    assert isinstance(state, Offload)
    return state


def store(workspace: Workspace, instruction: Instruction) -> Issue:
    """Copy activations to the host after their forward pass, or states after their step."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    values, made = workspace.values, (WEIGHTS if number == NONE else SAVED, stage, number)
    work = _state(workspace).work_of(instruction, lambda one: one.store())

    def issue(stream: Stream) -> Completion:
        ended = stream.run(label, work, values[made])
        values[STORED, stage, number] = Value.of(None, ended)
        return ended

    return issue


def release(workspace: Workspace, instruction: Instruction) -> Issue:
    """Free what has been copied to the host, in the order of computations, so that they take its memory."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    work = _state(workspace).work_of(instruction, lambda one: one.release())

    def issue(stream: Stream) -> Completion:
        # Before their first step there are no states, or those of a checkpoint.
        stored = workspace.values.pop((STORED, stage, number), THERE)
        return stream.run(label, work, stored)

    return issue


def room(workspace: Workspace, instruction: Instruction) -> Issue:
    """Take memory for the copy back, in the order of computations, which leave it free."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    work = _state(workspace).work_of(instruction, lambda one: one.take_room())

    def issue(stream: Stream) -> Completion:
        taken = stream.run(label, work)
        workspace.values[ROOM, stage, number] = Value.of(None, taken)
        return taken

    return issue


def load_states(workspace: Workspace, instruction: Instruction) -> Issue:
    """Copy a stage's states back for its step."""
    stage, label, state = instruction.stage, str(instruction), _state(workspace)

    def issue(stream: Stream) -> Completion:
        # There is room once they have been stored and freed.
        taken = workspace.values.pop((ROOM, stage, NONE))
        loaded = stream.run(label, state.states[stage].load, taken)
        workspace.values[LOADED, stage, NONE] = Value.of(None, loaded)
        return loaded

    return issue


def load_activations(workspace: Workspace, instruction: Instruction) -> Issue:
    """Copy the activations of a micro-batch back for its backward pass."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    state, values = _state(workspace), workspace.values

    def issue(stream: Stream) -> Completion:
        # There is room once they have been stored and freed.
        saved, taken = (values.pop((name, stage, number)) for name in (SAVED, ROOM))
        again: Value[object] = Value()

        def work() -> None:
            for one in state.activations.pop((stage, number)).storages:
                one.load()
            again.content = saved.content

        again.completion = stream.run(label, work, taken)
        values[SAVED, stage, number] = again
        return again.completion

    return issue


PARTS = (
    HandlerOf(kind="store_activations", handler=store),
    HandlerOf(kind="load_activations", handler=load_activations),
    HandlerOf(kind="store_states", handler=store),
    HandlerOf(kind="load_states", handler=load_states),
    HandlerOf(kind="release", handler=release),
    HandlerOf(kind="room", handler=room),
    StateOf(method=NAME, make=Offload),
)
