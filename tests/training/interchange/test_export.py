"""An exported run is the model that was trained: in `transformers`, and as the start of another run."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hugging_face_jobs import (
    PRECISIONS,
    inputs_of,
    model_folder,
    result_of,
    run_training,
    small,
    transformers_logits,
    whole_model,
    write_run,
    write_text,
)
from pool import RankError, WorkerPool
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.errors import InputError, RunError
from weft.progress import WorkDone
from weft.training.data.tokenizers import ByteTokenizer, fingerprint_of
from weft.training.interchange.export import export
from weft.training.interchange.imports import read_initial_weights
from weft.training.interchange.matching import model_shapes

pytestmark = pytest.mark.processes


CASES = (
    ("gpt", "fp64", True),
    ("llama", "fp32", False),
    ("bert", "fp32", True),
    ("vit", "fp32", False),
    ("resnet", "fp64", False),
    ("gemma3_text", "fp64", True),
    ("gpt_neox", "fp32", False),
)


@dataclass(frozen=True)
class Trained:
    """A run directory of two pipeline stages, the model's configuration and the run's precision."""

    run_dir: Path
    config: ModelConfig
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    def model(self, step: int = 4) -> torch.nn.Module:
        """The model of a checkpoint, put together by hand."""
        files = (self.run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
        tensors = {name: value for file in files for name, value in load_file(file).items()}
        model = whole_model(self.config, dtype=self.dtype)
        model.load_state_dict({name: tensors[name] for name in model.state_dict()})
        return model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def trained(
    request: pytest.FixtureRequest, worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    family, precision, tied = request.param
    home = tmp_path_factory.mktemp(family)
    config = small(family, tied=tied)
    folder = model_folder(home / "model", config)
    text = write_text(home / "text.txt")
    plan = write_run(home / "run", folder, text, precision=precision, weights=False, pp=2)
    assert worker_pool.run(run_training, home / "run", plan, ranks=2) == [0, 0]
    return Trained(home / "run", config, precision)


def test_transformers_computes_the_logits_of_the_run(trained: Trained, tmp_path: Path) -> None:
    exported = export(trained.run_dir, tmp_path / "out")
    written = exported.folder
    assert (exported.checkpoint, exported.skipped) == ("step-00000004", ())
    config = trained.config
    with torch.no_grad():
        ours = trained.model()(inputs_of(config))
    theirs = transformers_logits(tmp_path / "out", config, trained.dtype)
    assert torch.equal(ours, theirs)
    assert written.files == 1
    assert written.tensors == len(whole_model(config).state_dict())


def test_a_run_that_starts_from_the_export_begins_where_the_other_ended(
    trained: Trained, tmp_path: Path, worker_pool: WorkerPool
) -> None:
    export(trained.run_dir, tmp_path / "out", file_bytes=5_000)
    text = trained.run_dir.parent / "text.txt"
    layout = {"pp": 1, "dp": 2, "micro_batches": 2}
    plan = write_run(
        tmp_path / "next", tmp_path / "out", text, precision=trained.precision, weights=True, **layout
    )
    assert worker_pool.run(run_training, tmp_path / "next", plan, ranks=2) == [0, 0]
    first, last = result_of(tmp_path / "next")["first_loss"], result_of(trained.run_dir)["final_loss"]
    assert first == pytest.approx(last, rel=1e-12 if trained.precision == "fp64" else 1e-6)
    assert result_of(tmp_path / "next")["final_loss"] != first
    # A stopped run goes on from its own checkpoint and does not read the folder again.
    (tmp_path / "next" / "result.json").unlink()
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    assert worker_pool.run(run_training, tmp_path / "next", plan, ranks=2) == [0, 0]


def test_a_checkpoint_is_chosen_by_its_step(trained: Trained, tmp_path: Path) -> None:
    export(trained.run_dir, tmp_path / "out", checkpoint=2)
    config = trained.config
    model = whole_model(config, dtype=trained.dtype)
    read_initial_weights(tmp_path / "out", config, {0: model})
    expected = trained.model(step=2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match=r"no checkpoint of step 3; there are 2, 4 \(nearest valid: 4\)"):
        export(trained.run_dir, tmp_path / "other", checkpoint=3)


def test_large_models_are_cut_into_files_of_a_size(trained: Trained, tmp_path: Path) -> None:
    told: list[WorkDone] = []
    written = export(trained.run_dir, tmp_path / "out", file_bytes=5_000, report=told.append).folder
    # Every byte of the checkpoint is checked; every parameter is read and written.
    checked, last = [done for done in told if done.unit == "bytes"][-1], told[-1]
    assert (checked.work, checked.done) == ("checking step-00000004", checked.total)
    assert (last.work, last.done) == ("writing", last.total)
    assert last.total == 2 * sum(one.numel() for one in whole_model(trained.config).state_dict().values())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert written.files == len(files) > 1
    assert index["metadata"]["total_size"] == written.tensor_bytes
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            size = sum(tensors.get_tensor(name).nbytes for name in names)
        assert size <= 5_000 or len(names) == 1
        assert {index["weight_map"][name] for name in names} == {file.name}
    ours = trained.model()(inputs_of(trained.config))
    assert torch.equal(ours, transformers_logits(tmp_path / "out", trained.config, trained.dtype))


def test_the_tokenizer_gives_the_ids_of_the_run(trained: Trained, tmp_path: Path) -> None:
    export(trained.run_dir, tmp_path / "out")
    if trained.config.reads_images:
        assert not (tmp_path / "out" / "tokenizer.json").exists()
        return
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "warp und weft: ein Gewebe, größer als Ā \n\t  das Maß 織物"
    ids = tokenizer(text)["input_ids"]
    # The run's own tokenizer adds the id that ends a document.
    assert ids == ByteTokenizer().encode([text.encode()])[0].tolist()[:-1]
    assert tokenizer.decode(ids) == text


def test_a_tokenizer_that_has_changed_since_is_refused(trained: Trained, tmp_path: Path) -> None:
    if trained.config.reads_images:
        pytest.skip("a model of images has no tokenizer")
    run_dir = shutil.copytree(trained.run_dir, tmp_path / "run")
    events = (run_dir / "events.jsonl").read_text()
    told = fingerprint_of(ByteTokenizer())
    assert told in events
    (run_dir / "events.jsonl").write_text(events.replace(told, "another"))
    with pytest.raises(InputError, match=r"task\.tokenizer: bytes is no longer the tokenizer of this run"):
        export(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over_and_nothing_is_left_half_written(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export(trained.run_dir, tmp_path / "there")
    with pytest.raises(InputError, match=r"the folder .*absent does not exist"):
        export(trained.run_dir, tmp_path / "absent" / "out")

    def full_disk(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.training.interchange.hugging_face.write_whole", full_disk)
    with pytest.raises(RunError, match="out: not written: No space left on device"):
        export(trained.run_dir, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert (tmp_path / "there").read_text() == "mine"


def test_a_damaged_checkpoint_and_a_changed_model_are_refused(trained: Trained, tmp_path: Path) -> None:
    step = trained.run_dir / "checkpoints" / "step-00000004"
    file = next(step.glob("*.safetensors"))
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RunError, match="damaged"):
            export(trained.run_dir, tmp_path / "out", checkpoint=4)
        older = export(trained.run_dir, tmp_path / "older")
        assert older.checkpoint == "step-00000002"
        assert "damaged" in older.skipped[0]
    finally:
        file.write_bytes(whole)
    config_file = trained.run_dir.parent / "model" / "config.json"
    before = config_file.read_text()
    try:
        config_file.unlink()
        config_file.parent.rmdir()
        changed = replace(trained.config, vocabulary=trained.config.vocabulary + 1)
        keys = {"vocab_size": changed.vocabulary} if changed.record else {}
        model_folder(config_file.parent, changed, **keys)
        with pytest.raises(InputError, match="no longer the model that this run trained"):
            export(trained.run_dir, tmp_path / "changed")
    finally:
        config_file.write_text(before)


def test_a_folder_that_does_not_fit_starts_no_run(
    trained: Trained, tmp_path: Path, worker_pool: WorkerPool
) -> None:
    folder = model_folder(tmp_path / "bare", trained.config)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    plan = write_run(
        tmp_path / "run",
        folder,
        trained.run_dir.parent / "text.txt",
        precision=trained.precision,
        weights=True,
    )
    with pytest.raises(RankError, match=r"InputError: .*only pickled weights \(pytorch_model.bin\)"):
        worker_pool.run(run_training, tmp_path / "run", plan, ranks=1)


def test_a_model_of_ones_own_has_no_format() -> None:
    with pytest.raises(InputError, match="a model of your own has no format of transformers"):
        model_shapes(resolve_model("own_models:diamond"))
