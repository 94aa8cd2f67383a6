"""Checkpoints of torch's own format: what torch wrote is read, and no pickle gets to call anything."""

import builtins
import copyreg
import io
import os
import pickle
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import WorkerPool
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from weft.errors import InputError
from weft.training.interchange.dcp import METADATA, DcpFolder

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    tensors = {f"of.{str(kind)[6:]}": torch.randint(0, 9, (4, 3)).to(kind) for kind in PRECISIONS}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "view": torch.randn(6, 4)[1:4],
    }


def write_alone(path: Path) -> Path:
    """A checkpoint of one process, with an optimizer, numbers and text beside the tensors."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"model": values(), "optimizer": optimizer.state_dict(), "step": 7, "name": "linen"}
    dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def write_sharded(rank: int, ranks: int, path: Path) -> None:
    """Every rank holds a part of each tensor, uneven where the rows do not divide."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    dcp.save(
        {name: distribute_tensor(whole, mesh, where) for name, where in placements.items()},
        checkpoint_id=path,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_alone(tmp_path / "checkpoint")


def test_what_torch_wrote_is_read_bit_by_bit(folder: Path) -> None:
    read = DcpFolder(folder)
    for name, value in values().items():
        found = read.read(f"model.{name}")
        assert found.dtype == value.dtype
        assert read.shapes[f"model.{name}"] == tuple(value.shape)
        assert torch.equal(found, value)
    assert read.shapes["optimizer.state.0.exp_avg"] == (2, 3)
    assert read.others >= 2


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_several_ranks_are_put_together(
    worker_pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    worker_pool.run(write_sharded, tmp_path / "checkpoint", ranks=ranks)
    read = DcpFolder(tmp_path / "checkpoint")
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    assert set(read.shapes) == {"rows", "columns", "copies"}
    for name in read.shapes:
        assert torch.equal(read.read(name), whole)


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def name_of(module: str, name: str) -> bytes:
    """STACK_GLOBAL of protocol 4, which takes dotted names."""
    parts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return parts[0] + parts[1] + b"\x93"


def text_of(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def malicious(trace: Path) -> dict[str, bytes]:
    """Pickles that would write `trace` if anything they name were called."""
    command, write = f"touch {trace}", f"open({str(trace)!r}, 'w')"
    metadata = "torch.distributed.checkpoint.metadata"
    called = text_of(command) + b"\x85R."
    return {
        "os.system": pickle.dumps(Calls(os.system, command)),
        "protocol 0": pickle.dumps(Calls(os.system, command), protocol=0),
        "eval": pickle.dumps(Calls(eval, write)),
        "exec": pickle.dumps(Calls(exec, write)),
        "subprocess": pickle.dumps(Calls(subprocess.check_output, ["touch", str(trace)])),
        "import": pickle.dumps(Calls(__import__, "antigravity")),
        "getattr": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system")),
        "inside metadata": pickle.dumps(Metadata({"weight": Calls(os.system, command)})),  # type: ignore[dict-item]
        "as a key": pickle.dumps({Calls(eval, write): 1}),
        # Through a module that an admitted name lives in, and through the attributes of admitted names.
        "dotted": b"\x80\x04" + name_of(metadata, "os.system") + called,
        "dotted class": b"\x80\x04" + name_of(metadata, "Metadata.__init__.__globals__") + b".",
        "torch.os": b"\x80\x04" + name_of("torch", "os.system") + called,
        "torch.load": b"\x80\x04" + name_of("torch", "load") + text_of(str(trace)) + b"\x85R.",
        "torch.hub": b"\x80\x04" + name_of("torch.hub", "load") + called,
        "get_layout's neighbour": b"\x80\x04" + name_of("torch.serialization", "load") + called,
        "path that opens": b"\x80\x04" + name_of("pathlib", "Path.touch") + called,
        # The name is put into the memo while it is refused nowhere else, and fetched from there to be called.
        "memoised": b"\x80\x04" + name_of("os", "system") + b"\x94" + b"0" + b"h\x00" + called,
        "memoised twice": (
            b"\x80\x04" + name_of(metadata, "Metadata") + b"\x94" + name_of("builtins", "eval") + b"\x94"
            b"h\x01" + text_of(write) + b"\x85R."
        ),
        "GLOBAL": b"cos\nsystem\n" + b"V" + command.encode() + b"\n\x85R.",
        "INST": b"(V" + command.encode() + b"\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nV" + command.encode() + b"\no.",
        "NEWOBJ": b"\x80\x02cbuiltins\neval\nV" + write.encode() + b"\n\x85\x81.",
        "persistent id": b"Pos.system\n.",
        "copyreg": b"ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR.",
    }


@pytest.mark.parametrize("case", sorted(malicious(Path("unused"))))
def test_a_malicious_pickle_calls_nothing(tmp_path: Path, folder: Path, case: str) -> None:
    trace = tmp_path / "trace"
    content = malicious(trace)[case]
    modules = set(sys.modules)
    (folder / METADATA).write_bytes(content)
    with pytest.raises(InputError, match=r"refused: it (names|refers)"):
        DcpFolder(folder)
    assert not trace.exists()
    assert "antigravity" not in set(sys.modules) - modules


def test_the_pickles_of_these_tests_do_harm_where_they_are_trusted(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for case in ("os.system", "eval", "memoised", "GLOBAL", "INST", "inside metadata"):
        pickle.loads(malicious(trace)[case])
        assert trace.exists(), case
        trace.unlink()


def test_an_extension_code_is_looked_up_as_a_name(folder: Path, tmp_path: Path) -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        content = b"\x80\x02\x82" + bytes([240]) + b"V" + f"touch {tmp_path / 'trace'}".encode() + b"\n\x85R."
        (folder / METADATA).write_bytes(content)
        with pytest.raises(InputError, match="refused"):
            DcpFolder(folder)
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert not (tmp_path / "trace").exists()


def test_what_a_pickle_does_to_an_admitted_class_ends_with_the_file(folder: Path) -> None:
    """BUILD with slots sets attributes of whatever is on the stack, classes included."""
    metadata = "torch.distributed.checkpoint.metadata"
    names = [name_of(metadata, name) for name in ("Metadata", "TensorProperties", "MetadataIndex")]
    for name in (*names, name_of("torch", "float32"), name_of("torch", "Size")):
        slots = b"N}" + text_of("__setstate__") + text_of("poison") + b"s\x86b"
        (folder / METADATA).write_bytes(b"\x80\x04" + name + slots + b".")
        with pytest.raises(InputError):
            DcpFolder(folder)
    assert callable(TensorProperties.__setstate__)
    assert not hasattr(Metadata, "__setstate__")
    assert not hasattr(builtins, "poison")
    write_alone(folder.parent / "next")
    assert DcpFolder(folder.parent / "next").shapes["model.scalar"] == ()


@pytest.mark.parametrize(
    "by_name",
    [
        lambda self, protocol: (getattr, (type(self), self.name)),
        lambda self, protocol: (type(self), (self.value,)),
    ],
)
def test_members_of_enumerations_are_read_as_any_python_writes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_name: Callable[[Any, Any], Any]
) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    written(folder, lambda metadata: None)
    monkeypatch.undo()
    for name, value in values().items():
        assert torch.equal(DcpFolder(folder).read(f"model.{name}"), value)


def test_getattr_in_a_pickle_gets_nothing(folder: Path, tmp_path: Path) -> None:
    """Of an admitted class: its methods would lead to everything that is imported."""
    trace = tmp_path / "trace"
    metadata = name_of("torch.distributed.checkpoint.metadata", "Metadata")
    method = name_of("builtins", "getattr") + metadata + text_of("__init__") + b"\x86R"
    for then in (b".", text_of(f"touch {trace}") + b"\x85R."):
        (folder / METADATA).write_bytes(b"\x80\x04" + method + then)
        with pytest.raises(InputError):
            DcpFolder(folder)
    assert not trace.exists()


def written(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Rewrite the metadata with a change."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def leave_folder(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path


def forget_places(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def leave_gap(metadata: Metadata) -> None:
    tensor = TensorStorageMetadata(
        TensorProperties(), torch.Size([9, 3]), [ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([4, 3]))]
    )
    metadata.state_dict_metadata["model.scalar"] = tensor
    info = metadata.storage_data[MetadataIndex("model.scalar", [])]
    metadata.storage_data[MetadataIndex("model.scalar", [5, 0])] = info


def compress(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leave_folder, r"'\.\./__0_0.distcp' is not the name of a file in the folder"),
        (forget_places, "not the metadata of a checkpoint"),
        (leave_gap, "the 1 pieces of model.scalar overlap or do not make up a whole"),
        (compress, "is compressed, which is not supported"),
    ],
)
def test_metadata_that_does_not_describe_the_folder_is_refused(
    folder: Path, change: Callable[[Metadata], None], message: str
) -> None:
    written(folder, change)
    with pytest.raises(InputError, match=message):
        DcpFolder(folder)


def test_a_tensors_bytes_are_loaded_as_weights_alone(folder: Path, tmp_path: Path) -> None:
    """The place of a tensor is a whole file of torch.save, in which a pickle could hide as well."""
    trace = tmp_path / "trace"
    buffer = io.BytesIO()
    torch.save(Calls(os.system, f"touch {trace}"), buffer)
    (folder / "evil.distcp").write_bytes(buffer.getvalue())

    def point_there(metadata: Metadata) -> None:
        info = metadata.storage_data[MetadataIndex("model.scalar", [])]
        info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())

    written(folder, point_there)
    with pytest.raises(InputError, match=r"model.scalar cannot be read: Weights only load failed"):
        DcpFolder(folder).read("model.scalar")
    assert not trace.exists()


def test_torn_data_is_refused_in_one_line(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError) as refused:
        DcpFolder(folder).read("model.view")
    assert "model.view cannot be read" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        DcpFolder(folder).read("model.view")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A checkpoint to damage, and its metadata."""
    path = write_alone(tmp_path_factory.mktemp("good") / "checkpoint")
    return path, (path / METADATA).read_bytes()


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_metadata_is_refused_or_still_describes_tensors(
    good: tuple[Path, bytes], data: st.DataObject
) -> None:
    path, content = good
    place = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[place] ^= data.draw(st.integers(1, 255))
    (path / METADATA).write_bytes(bytes(damaged))
    try:
        shapes = DcpFolder(path).shapes
    except InputError:
        return
    assert all(type(size) is int for shape in shapes.values() for size in shape)


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("random")
    (path / METADATA).write_bytes(b"\x80\x04" + content)
    with pytest.raises(InputError):
        DcpFolder(path)


def test_a_number_beyond_the_file_is_refused_without_memory(folder: Path) -> None:
    # An empty list, stored as object number 2^32 - 1: the unpickler would reserve a table of 64 GiB.
    (folder / METADATA).write_bytes(b"\x80\x02]r\xff\xff\xff\xff.")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="number 4294967295"):
        DcpFolder(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_length_beyond_the_file_is_refused(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60))
    with pytest.raises(InputError, match="a damaged pickle"):
        DcpFolder(folder)
