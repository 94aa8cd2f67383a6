"""Blends: shares of several sources, whole epochs of each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.run_file import load_run, parse_run
from weft.errors import InputError
from weft.training.data.sampler import SampleLedger
from weft.training.data.text import Blend, Windows, open_blend, open_corpus
from weft.training.data.tokenizers import get_tokenizer
from weft.training.tasks import make_task
from weft.training.tasks.base import TaskSettings, sources_of_task


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_an_epoch_has_every_sample_at_least_once_and_sources_by_their_shares(
    sizes: list[int], weights: list[int]
) -> None:
    # The tokens of a source say whose they are, and where.
    parts = tuple(Windows(np.arange(size + 1) + 1000 * number, 1) for number, size in enumerate(sizes))
    shares = tuple(weight / sum(weights[: len(sizes)]) for weight in weights[: len(sizes)])
    blend = Blend(parts, shares)
    first = blend.take(np.arange(len(blend)))[:, 0]
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        own = first[first // 1000 == number] % 1000
        assert set(own.tolist()) == set(range(size))
        counts = np.bincount(own)
        assert counts.max() - counts.min() <= 1
        assert abs(len(own) - share * len(blend)) <= len(sizes)
    # Any order gives the same samples.
    order = np.random.default_rng(0).permutation(len(blend))
    assert (blend.take(order)[:, 0] == first[order]).all()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    block=st.integers(2, 5),
    seed=st.integers(0, 3),
)
def test_blocks_are_of_one_source_and_an_epoch_still_has_every_sample(
    sizes: list[int], weights: list[int], block: int, seed: int
) -> None:
    parts = tuple(Windows(np.arange(size + 1) + 1000 * number, 1) for number, size in enumerate(sizes))
    shares = tuple(weight / sum(weights[: len(sizes)]) for weight in weights[: len(sizes)])
    blend = Blend(parts, shares, block)
    assert len(blend) % block == 0
    drawn = blend.take(SampleLedger(len(blend), seed, block).take(0, len(blend)))[:, 0]
    owners = (drawn // 1000).reshape(-1, block)
    assert (owners == owners[:, :1]).all()
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        own = drawn[drawn // 1000 == number] % 1000
        counts = np.bincount(own, minlength=size)
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        assert abs(len(own) - share * len(blend)) <= block * len(sizes)


def test_samples_of_a_block_come_from_places_far_from_each_other() -> None:
    blend = Blend((Windows(np.arange(13), 1), Windows(np.arange(13) + 1000, 1)), (0.5, 0.5), 3)
    assert blend.take(np.arange(6))[:, 0].tolist() == [0, 4, 8, 1, 5, 9]
    assert [own.start for own in blend.numbers] == [0, 12]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, letter in (("a", b"a"), ("b", b"b")):
        (tmp_path / f"{name}.txt").write_bytes(letter * 3000)
    return tmp_path


def test_text_is_blended_on_both_sides(folder: Path) -> None:
    sources = {str(folder / "a.txt"): 3.0, str(folder / "b.txt"): 1.0}
    settings = TaskSettings(data=sources, sequence=8, vocabulary=256, cache=folder / "cache")
    task = make_task("causal-lm", settings)
    for held_out, count in ((False, task.samples), (True, task.held_out_samples)):
        inputs, _ = task.batch(np.arange(count), held_out=held_out)
        share = (inputs[:, 0] == ord("a")).double().mean().item()
        assert share == pytest.approx(0.75, abs=0.05)
    one, other = (open_corpus(source, 8, get_tokenizer("bytes"), folder / "cache") for source in sources)
    blend = open_blend(sources, 8, get_tokenizer("bytes"), folder / "cache")
    assert len(blend.training) == pytest.approx(4 * len(other.training), abs=2)
    assert blend.fingerprint not in (one.fingerprint, other.fingerprint)
    turned = dict(reversed(sources.items()))
    assert open_blend(turned, 8, get_tokenizer("bytes"), folder / "cache").fingerprint != blend.fingerprint


def test_a_blend_names_its_sources_and_their_samples(folder: Path) -> None:
    sources = {str(folder / "a.txt"): 3.0, str(folder / "b.txt"): 1.0}
    settings = TaskSettings(data=sources, sequence=8, vocabulary=256, cache=folder / "cache")
    task = make_task("causal-lm", settings)
    first, second = sources_of_task(task)
    assert [first.name, second.name] == list(sources)
    assert [first.share, second.share] == [0.75, 0.25]
    for one, letter in ((first, "a"), (second, "b")):
        for numbers, held_out in ((one.training, False), (one.held_out, True)):
            inputs, _ = task.batch(np.array(numbers), held_out=held_out)
            assert set(inputs.unique().tolist()) <= {ord(letter), 0}
    assert first.training.stop == second.training.start
    assert second.training.stop == task.samples
    alone = TaskSettings(data=str(folder / "a.txt"), sequence=8, vocabulary=256, cache=folder / "cache")
    assert sources_of_task(make_task("causal-lm", alone)) == ()


def test_blocks_are_another_order_of_the_data(folder: Path) -> None:
    sources = {str(folder / "a.txt"): 3.0, str(folder / "b.txt"): 1.0}
    settings = TaskSettings(data=sources, sequence=8, vocabulary=256, cache=folder / "cache")
    blocks = replace(settings, source_block=4)
    tasks = [make_task("causal-lm", one) for one in (settings, blocks)]
    assert tasks[0].fingerprint != tasks[1].fingerprint
    assert tasks[1].samples % 4 == 0


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"task": {"source_block": 2}}, r"run: task: source_block: 2; the data has one source"),
        (
            {"task": {"data": {"a": 1, "b": 1}, "source_block": 6}},
            r"run: train\.global_batch: missing; a batch has whole blocks of 6 samples.*6",
        ),
        (
            {"task": {"data": {"a": 1, "b": 1}, "source_block": 6}, "train": {"global_batch": 16}},
            r"run: task\.source_block: 6 samples; a batch of 16 has no whole number of such blocks.*4",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(tables: dict[str, object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        parse_run({"model": {"preset": "gpt-1m"}, **tables})


def test_sources_of_a_run_file_lie_beside_it_and_come_back(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[task.data]\n"a.txt" = 70\n"b.txt" = 0.5\n')
    run = load_run(path)
    assert run.task.data == {str(folder / "a.txt"): 70, str(folder / "b.txt"): 0.5}
    path.write_text(run.to_toml())
    assert load_run(path).task == run.task


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, r"run: task\.data: \{\}: must be a source, or sources with their weights .*"),
        ("", r"run: task\.data: '': must be a source, or sources with their weights .*"),
        (["a"], r"run: task\.data: \['a'\]: must be a source, or sources with their weights .*"),
        ({"a": 0}, r"run: task\.data: a: 0: its weight must be a number above 0"),
        ({"a": float("nan")}, r"run: task\.data: a: nan: its weight must be a number above 0"),
        ({"a": "much"}, r"run: task\.data: a: 'much': its weight must be a number above 0"),
        ({"a": True, "b": 1}, r"run: task\.data: a: True: its weight must be a number above 0"),
    ],
)
def test_bad_sources_and_weights_are_refused_with_one_line(data: object, line: str) -> None:
    with pytest.raises(InputError, match=f"^{line}$") as refused:
        parse_run({"model": {"preset": "gpt-1m"}, "task": {"data": data}})
    assert len(refused.value.violations) == 1


@pytest.mark.parametrize("weights", [(1e-30, 30.0), (5e-324, 1.0), (1e308, 1e308)])
def test_a_weight_that_no_epoch_can_serve_is_refused(folder: Path, weights: tuple[float, float]) -> None:
    sources = {str(folder / f"{name}.txt"): one for name, one in zip("ab", weights, strict=True)}
    weight = re.escape(f"weight {weights[0]:g}")
    line = rf"task\.data: '.*a\.txt': {weight} is too small beside the others to be read whole"
    with pytest.raises(InputError, match=line):
        open_blend(sources, 8, get_tokenizer("bytes"), folder / "cache")


def test_only_text_is_blended(folder: Path) -> None:
    settings = TaskSettings(data={"a": 1.0, "b": 1.0}, sequence=8, vocabulary=256, cache=folder)
    with pytest.raises(
        InputError, match=r"task\.data: 2 sources; only causal-lm and masked-lm blend sources"
    ):
        make_task("chat", settings)
