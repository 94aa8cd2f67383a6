"""Runs with low-rank products: resumed to the same bits under another plan, exported merged and apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hugging_face_jobs import model_folder, result_of, small, whole_model
from pool import RankError, WorkerPool
from pooled_runs import trained
from safetensors.torch import load_file, save_file
from stopped_runs import saved, through_and_stopped

from weft.cli.main import run

RUN_SEED = 4
RUN = """
[model]
hf = "{folder}/base"
weights = {weights}
[task]
data = "{folder}/text.txt"
sequence = 8
[train]
global_batch = 4
steps = 3
seed = 4
[optimizer]
learning_rate = 0.05
warm_up_steps = 1
[plan]
pp = 2
dp = 1
micro_batch_size = 1
schedule = "1f1b"
then = {{ at_step = 1, pp = 1, dp = 2, micro_batch_size = 1, schedule = "1f1b" }}
[lora]
rank = 4
targets = {targets}
{base}
"""


def lora_run(folder: Path, weights: str, targets: list[str], base: str = "") -> str:
    config = small("llama")
    model_folder(folder / "base", config)
    state = {name: one.contiguous() for name, one in whole_model(config, seed=9).state_dict().items()}
    save_file(state, folder / "base" / "model.safetensors")
    (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
    return RUN.format(folder=folder, weights=weights, targets=json.dumps(targets), base=base)


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("in_few_bits", [pytest.param("", marks=pytest.mark.tables), 'base = "nf4"'])
def test_a_run_resumes_to_the_same_bits_and_its_base_stays(
    tmp_path: Path, worker_pool: WorkerPool, in_few_bits: str
) -> None:
    source = lora_run(tmp_path, "true", [], in_few_bits)
    whole, _ = through_and_stopped(worker_pool, tmp_path, source, steps=3, stop=2)
    base = load_file(tmp_path / "base" / "model.safetensors")
    kept = saved(whole)
    assert all(".lora_" in name for name in kept)
    states = {name.split("/")[1] for name in kept if name.startswith("optimizer/")}
    assert states == {name for name in kept if ".lora_" in name and "/" not in name}

    assert run(["export", str(whole), str(tmp_path / "merged")]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == base.keys()
    moved = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert moved == {name for name in base if "_proj" in name}

    assert run(["export", str(whole), str(tmp_path / "adapter"), "--adapter"]) == 0
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * len(moved)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(tmp_path / "base")

    # The loss that the run told is that of the merged model.
    after = tmp_path / "after"
    after.mkdir()
    text = source.replace(f"{tmp_path}/base", f"{tmp_path}/merged").partition("[lora]")[0]
    (after / "run.toml").write_text(text)
    trained(worker_pool, after / "run.toml", directory=after / "run", steps=3)
    first, last = result_of(after / "run")["first_loss"], result_of(whole)["final_loss"]
    assert first == pytest.approx(last, rel=1e-5)
    assert last < result_of(whole)["first_loss"]


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_base_from_the_seed_is_merged_and_has_no_adapter(
    tmp_path: Path, worker_pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    # Four stages of a layer each: the ones of the embedding and of the head have nothing to save.
    source = lora_run(tmp_path, "false", ["q_proj"]).replace("pp = 2", "pp = 4")
    lines = [line for line in source.splitlines() if not line.startswith("then")]
    (tmp_path / "run.toml").write_text("\n".join([*lines, '[cluster]\nuse = "4xt4"\n']))
    trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run", steps=2)
    trained(worker_pool, tmp_path / "run.toml", resume=tmp_path / "run", steps=3)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "its frozen weights come from the seed" in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()
    drawn = whole_model(small("llama"), seed=RUN_SEED).state_dict()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    moved = {name for name, value in merged.items() if not torch.equal(value, drawn[name])}
    assert moved == {name for name in drawn if "q_proj" in name}


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_run_goes_on_with_its_own_base_alone(
    tmp_path: Path, worker_pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(lora_run(tmp_path, "true", []))
    trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run", steps=2)
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: value + 1.0 for name, value in load_file(file).items()}, file)
    with pytest.raises(RankError, match=r"saved with frozen weights [0-9a-f]{16}, this run has [0-9a-f]{16}"):
        trained(worker_pool, tmp_path / "run.toml", resume=tmp_path / "run", steps=3)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 2
    assert "not the frozen weights of this run" in capsys.readouterr().err
    file.write_bytes(b"nothing")
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 2
    assert "not a whole safetensors file" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_run_that_trains_all_weights_has_no_adapter(
    tmp_path: Path, worker_pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(lora_run(tmp_path, "true", []).partition("[lora]")[0])
    trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run", steps=3)
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "this run trains all weights of its model" in capsys.readouterr().err
