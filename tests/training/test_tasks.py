"""Tasks: the registry, one's own, and what causal language modelling gives."""

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.errors import InputError
from weft.training.tasks import make_task
from weft.training.tasks.base import Meter, TaskSettings, batch_of
from weft.training.tasks.text import CausalLanguageModelling


@pytest.fixture
def settings(tmp_path: Path) -> TaskSettings:
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 2000, dtype=np.uint8).tobytes())
    return TaskSettings(data=str(text), sequence=16, vocabulary=256, cache=tmp_path / "cache")


def replaced(settings: TaskSettings, **changes: object) -> TaskSettings:
    values = {name: getattr(settings, name) for name in ("data", "sequence", "vocabulary", "cache")}
    return TaskSettings(**{**values, **changes})  # type: ignore[arg-type]


def test_targets_are_the_inputs_one_token_later(settings: TaskSettings) -> None:
    task = make_task("causal-lm", settings)
    inputs, targets = task.batch(np.array([3, 0]))
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (
        torch.equal(inputs[1], torch.tensor([97 + number % 26 for number in range(16)])) or inputs[1, 0] != 97
    )


def test_held_out_samples_are_not_training_samples(settings: TaskSettings) -> None:
    task = make_task("causal-lm", settings)
    training = bytes(task.batch(np.arange(task.samples))[0].flatten().tolist())
    held_out, _ = task.batch(np.arange(task.held_out_samples), held_out=True)
    assert held_out.shape == (task.held_out_samples, 16)
    assert not any(bytes(sample.tolist()) in training for sample in held_out)
    assert all(bytes(sample.tolist()) in Path(settings.data).read_bytes() for sample in held_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_is_the_mean_over_tokens_in_at_least_fp32(
    settings: TaskSettings, dtype: torch.dtype
) -> None:
    task = make_task("causal-lm", settings)
    logits = torch.zeros(2, 16, 256, dtype=dtype)
    targets = torch.randint(0, 256, (2, 16))
    loss = task.loss(logits, targets)
    assert loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(np.log(256), rel=1e-6)


def test_losses_of_equal_micro_batches_average_to_the_loss_of_all(settings: TaskSettings) -> None:
    task = make_task("causal-lm", settings)
    logits = torch.randn(4, 16, 256, dtype=torch.float64)
    targets = torch.randint(0, 256, (4, 16))
    parts = [task.loss(logits[i : i + 1], targets[i : i + 1]) for i in range(4)]
    assert torch.stack(parts).mean().item() == pytest.approx(task.loss(logits, targets).item(), abs=1e-12)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(settings: TaskSettings) -> None:
    with pytest.raises(InputError, match="at least 256"):
        make_task("causal-lm", replaced(settings, vocabulary=100))


def test_an_unknown_task_is_refused_with_the_nearest(settings: TaskSettings) -> None:
    with pytest.raises(InputError, match="nearest valid: causal-lm"):
        make_task("casual-lm", settings)


class Own(CausalLanguageModelling):
    """A task of one's own."""


def test_a_task_of_ones_own_is_imported(settings: TaskSettings) -> None:
    assert isinstance(make_task(f"{__name__}:Own", settings), Own)


@pytest.mark.parametrize(
    "kind",
    ["absent_module:Task", "weft.training.tasks:Absent", ":Task", "weft.training.tasks:", "pathlib:Path"],
)
def test_what_is_no_task_is_refused_in_one_line(settings: TaskSettings, kind: str) -> None:
    with pytest.raises(InputError) as refused:
        make_task(kind, settings)
    assert len(refused.value.violations) == 1
    assert kind in str(refused.value)


class Changed(Own):
    """What a user's task may have wrong, by the name in `data`."""

    samples = held_out_samples = tokens_per_sample = 1
    fingerprint = "changed"

    def __init__(self, settings: TaskSettings) -> None:
        name, _, value = str(settings.data).partition(" = ")
        if name == "init":
            raise FileNotFoundError(value)
        setattr(self, name, eval(value))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("samples = 3.0", "has samples = 3.0: must be a positive integer"),
        ("held_out_samples = 0", "has held_out_samples = 0: must be a positive integer"),
        ("fingerprint = None", "has fingerprint = None: must be text"),
        ("init = gone", r"cannot be made: FileNotFoundError: gone \(test_tasks.py, line \d+\)"),
    ],
)
def test_a_task_without_a_needed_member_is_refused(settings: TaskSettings, data: str, message: str) -> None:
    with pytest.raises(InputError, match=f"task.kind: '{__name__}:Changed' {message}$"):
        make_task(f"{__name__}:Changed", replaced(settings, data=data))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("{}", "batch returned dict, no pair of inputs and targets"),
        ("(torch.zeros(2, 3),)", "batch returned tuple, no pair"),
        ("(np.zeros((2, 3)), torch.zeros(2))", "batch returned ndarray in place of a tensor"),
        ("(torch.zeros(2, 3), torch.tensor(1.0))", r"of shape \[\]; its first axis must be the 2 samples"),
        (
            "((torch.zeros(2), torch.zeros(1, 3)), torch.zeros(2))",
            r"of shape \[1, 3\]; its first axis must be",
        ),
    ],
)
def test_a_batch_of_other_than_the_samples_is_refused(
    settings: TaskSettings, batch: str, message: str
) -> None:
    task = make_task(f"{__name__}:Changed", replaced(settings, data=f"batch = lambda *a, **b: {batch}"))
    with pytest.raises(TypeError, match=message):
        batch_of(task, np.arange(2), lambda: np.arange(2))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("3", "metrics returned int, no mapping from names"),
        ("{'share': 'half'}", "metrics returned str as 'share', no single number"),
        ("{'share': torch.zeros(2)}", "metrics returned Tensor as 'share', no single number"),
    ],
)
def test_metrics_are_numbers_with_names(settings: TaskSettings, metrics: str, message: str) -> None:
    data = f"metrics = lambda *a: {metrics}"
    meter = Meter(make_task(f"{__name__}:Changed", replaced(settings, data=data)))
    with meter.open(), pytest.raises(TypeError, match=message):
        meter(torch.zeros(3), torch.zeros(3))


def test_documents_of_text_end_with_their_end_tokens(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("word " * (1 + number % 7))
    settings = TaskSettings(
        data=f"{tmp_path}/*.txt", sequence=16, vocabulary=256, cache=tmp_path / "cache", packing=True
    )
    task = make_task("causal-lm", settings)
    plain = make_task("causal-lm", replaced(settings))
    inputs, targets, documents = task.batch(np.arange(task.samples))
    assert torch.equal(inputs, plain.batch(np.arange(task.samples))[0])
    assert torch.equal(targets, plain.batch(np.arange(task.samples))[1])
    # A run does not go on with other attention.
    assert task.fingerprint != plain.fingerprint
    assert any(len(lengths) > 2 for lengths in documents)
    for row, lengths in zip(inputs, documents, strict=True):
        *ended, last = row.split(lengths)
        assert all(one[-1] == 0 and (one[:-1] != 0).all() for one in ended)
        assert (last[:-1] != 0).all()
