"""`weft export` and `weft import` say what they wrote; what they refuse is one line and leaves nothing."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hugging_face_jobs import model_folder, run_training, small, whole_model, write_run, write_text
from pool import WorkerPool

from weft.cli.main import run
from weft.describe.run_file import parse_run
from weft.errors import InputError

pytestmark = pytest.mark.processes


def test_export_writes_a_folder(
    worker_pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "model", small("gpt"))
    text = write_text(tmp_path / "text.txt")
    plan = write_run(tmp_path / "run", folder, text, precision="fp32", weights=False)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "checkpoints: no checkpoint yet" in capsys.readouterr().err
    worker_pool.run(run_training, tmp_path / "run", plan, ranks=1)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    tensors = whole_model(small("gpt")).state_dict()
    assert record == {
        "path": str(tmp_path / "out"),
        "checkpoint": "step-00000004",
        "files": 1,
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "older"), "--checkpoint", "2"]) == 0
    assert "files: 1; step-00000002" in capsys.readouterr().out
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"weft: {tmp_path / 'out'}: exists already; give another path\n"
    # The newest checkpoint loses a file: the older one is taken, and it is said.
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json").unlink()
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "next")]) == 0
    captured = capsys.readouterr()
    assert "weft: skipped a checkpoint" in captured.err
    assert "step-00000002" in captured.out


def test_import_makes_a_folder_of_a_checkpoint_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("llama")
    shape = model_folder(tmp_path / "shape", config)
    tensors = whole_model(config).state_dict()
    dcp.save({**tensors, "more": torch.ones(1)}, checkpoint_id=tmp_path / "source", no_dist=True)
    words = ["import", str(tmp_path / "source"), str(tmp_path / "out"), "--model", str(shape)]
    assert run([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["tensors"], record["left_out"]) == (len(tensors), 1)
    assert run(words) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "source" / ".metadata").write_bytes(b"cos\nsystem\n(V0\ntR.")
    assert run(["import", words[1], str(tmp_path / "another"), *words[3:]]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert "it names 'os.system', which is no part of a checkpoint's metadata" in captured.err


def test_weights_need_a_folder() -> None:
    with pytest.raises(InputError, match=r"weights: needs hf, the folder that holds them"):
        parse_run({"model": {"preset": "gpt-1m", "weights": True}})
    assert parse_run({"model": {"hf": "folder", "weights": True}}).model.weights
