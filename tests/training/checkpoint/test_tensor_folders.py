"""Folders of tensors: pieces make up a whole exactly once, and what is broken is refused in one line."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from weft.errors import InputError
from weft.training.checkpoint.tensor_folders import FilePiece, SafetensorsFolder, assembled, whole_shapes
from weft.training.interchange.weight_files import INDEX

FILE = Path("file")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[FilePiece]]:
    """A shape, and boxes that make it up: cut in two again and again, in any direction."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    pieces = [FilePiece((0,) * len(shape), shape, FILE)]
    for _ in range(draw(st.integers(0, 6))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, piece.sizes[axis]))
        low, high = list(piece.sizes), list(piece.sizes)
        low[axis], high[axis] = at, piece.sizes[axis] - at
        offset = list(piece.offsets)
        offset[axis] += at
        pieces += [FilePiece(piece.offsets, tuple(low), FILE), FilePiece(tuple(offset), tuple(high), FILE)]
    return shape, draw(st.permutations(pieces))


def filled(piece: FilePiece) -> bool:
    return bool(np.prod(piece.sizes))


@given(cuts())
def test_pieces_that_make_up_a_tensor_are_put_together(cut: tuple[tuple[int, ...], list[FilePiece]]) -> None:
    shape, pieces = cut
    assert whole_shapes("here", {"weight": pieces}) == {"weight": shape}
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    boxes = [
        tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
        for piece in pieces
    ]
    parts = [(piece, whole[box]) for piece, box in zip(pieces, boxes, strict=True)]
    assert torch.equal(assembled(shape, parts), whole)


@given(cuts(), st.data())
def test_a_piece_twice_is_refused_and_so_is_a_gap(
    cut: tuple[tuple[int, ...], list[FilePiece]], data: st.DataObject
) -> None:
    shape, pieces = cut
    chosen = data.draw(st.sampled_from([piece for piece in pieces if filled(piece)]))
    with pytest.raises(InputError, match="pieces of weight overlap or do not make up a whole"):
        whole_shapes("here", {"weight": [*pieces, chosen]})
    rest = [piece for piece in pieces if piece is not chosen]
    if any(filled(piece) for piece in rest):
        # What is left may be a smaller whole, but never the same one.
        with suppress(InputError):
            assert whole_shapes("here", {"weight": rest})["weight"] != shape


@pytest.mark.parametrize(
    "pieces",
    [
        [FilePiece((0,), (4,), FILE), FilePiece((9,), (0,), FILE)],
        [FilePiece((-1,), (4,), FILE)],
        [FilePiece((0,), (1 << 63,), FILE)],
        [FilePiece((1,), (4,), FILE)],
        [FilePiece((0,), (4, 4), FILE)],
        [FilePiece((), (), FILE), FilePiece((), (), FILE)],
    ],
)
def test_pieces_that_are_no_boxes_of_one_tensor_are_refused(pieces: list[FilePiece]) -> None:
    with pytest.raises(InputError, match="overlap or do not make up a whole"):
        whole_shapes("here", {"weight": pieces})


def write_pieces(rank: int, ranks: int, path: Path, consolidated: bool) -> None:
    """As torchtitan saves in the form of Hugging Face: each rank its rows; merged afterwards or not."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    tensors = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in some_tensors().items()}
    writer = HuggingFaceStorageWriter(
        str(path),
        fqn_to_index_mapping={"a.weight": 1, "b.weight": 2},
        save_distributed=True,
        enable_consolidation=consolidated,
    )
    dcp.save(tensors, storage_writer=writer)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "b.weight": torch.arange(6, dtype=torch.bfloat16),
    }


@pytest.mark.processes
@pytest.mark.parametrize("consolidated", [False, True])
def test_what_torchs_storage_writes_is_read(
    worker_pool: WorkerPool, tmp_path: Path, consolidated: bool
) -> None:
    worker_pool.run(write_pieces, tmp_path / "folder", consolidated, ranks=2)
    assert (tmp_path / "folder" / "model-00001-of-00002.safetensors").exists() == consolidated
    folder = SafetensorsFolder(tmp_path / "folder")
    assert folder.shapes == {"a.weight": (7, 5), "b.weight": (6,)}
    for name, value in some_tensors().items():
        assert torch.equal(folder.read(name), value)


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert SafetensorsFolder(tmp_path).shapes == {"a": (2,), "b": (3,)}
    (tmp_path / INDEX).unlink()
    with pytest.raises(InputError, match="the 2 pieces of a overlap"):
        SafetensorsFolder(tmp_path)
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert SafetensorsFolder(tmp_path).shapes == {"c": (1,)}


@pytest.mark.parametrize("name", ["missing.safetensors", "../outside.safetensors", "", ".."])
def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name, "b": "gone.safetensors"}}))
    with pytest.raises(InputError) as refused:
        SafetensorsFolder(folder)
    assert len(refused.value.violations) == 2
    assert all("no such file in the folder" in line for line in str(refused.value).splitlines())


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InputError, match="no weight_map"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "last.ckpt", "model.pt"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"only pickled weights \({name}\), which can run any program"):
        SafetensorsFolder(tmp_path)


def test_other_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no safetensors files"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        SafetensorsFolder(tmp_path / "absent")
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(InputError, match="weft import FOLDER OUT --model NAME"):
        SafetensorsFolder(tmp_path)


@given(st.data())
def test_a_damaged_header_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged")
    file = path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(1)}, file)
    whole = file.read_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(whole[:length])
    with pytest.raises(InputError, match="not a whole safetensors file") as refused:
        SafetensorsFolder(path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("sharding", ['{"a": {}}', "[", "{}1", '{"b": {"saved_offsets": [0, 0]}}', "[1]"])
def test_offsets_that_make_no_sense_are_refused(tmp_path: Path, sharding: str) -> None:
    save_file(
        {"a": torch.ones(2, 3)}, tmp_path / "shard.safetensors", metadata={"DCP_SHARDING_INFO": sharding}
    )
    with pytest.raises(InputError, match="not a whole safetensors file"):
        SafetensorsFolder(tmp_path)
