"""Laws: documents are packed once each, into samples of which no two could be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.training.data.chats import Chats, PackedChats, open_chats
from weft.training.data.packing import best_fit
from weft.training.data.tokenizers import get_tokenizer

CAPACITY = 40


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120))
def test_every_document_is_in_one_sample_that_holds_it(lengths: list[int]) -> None:
    each = np.array(lengths)
    packs = best_fit(each, CAPACITY)
    assert sorted(packs.documents.tolist()) == list(range(len(lengths)))
    sums = packs.sums(each)
    assert [int(each[packs.of(sample)].sum()) for sample in range(len(packs))] == sums.tolist()
    assert sums.max() <= CAPACITY
    # No two samples could be one.
    assert len(packs) == 1 or np.sort(sums)[:2].sum() > CAPACITY


def test_best_fit_takes_the_least_space_that_is_enough() -> None:
    # After 7, 6 and 5 the spaces are 3, 4 and 5: documents of 3 and of 4 fill two of them.
    packs = best_fit(np.array([7, 6, 5, 4, 3]), 10)
    assert [packs.of(sample).tolist() for sample in range(len(packs))] == [[0, 4], [1, 3], [2]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("packed"), np.random.default_rng(3)
    rows: list[dict[str, Any]] = [
        {"prompt": "q" * int(asks), "completion": "a" * int(answers)}
        for asks, answers in random.integers(1, 30, (90, 2))
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "chats.jsonl"


def test_packed_samples_hold_each_conversation_as_it_is_alone(source: Path) -> None:
    plain, packed = (
        open_chats(str(source), CAPACITY, get_tokenizer("bytes"), source.parent / "cache", packing=packing)
        for packing in (False, True)
    )
    assert plain.fingerprint != packed.fingerprint
    for alone, together in ((plain.training, packed.training), (plain.held_out, packed.held_out)):
        assert isinstance(alone, Chats)
        assert isinstance(together, PackedChats)
        rows = together.rows(np.arange(len(together)))
        assert rows.inputs.shape == rows.targets.shape == rows.asked.shape == (len(together), CAPACITY)
        assert (rows.asked.sum(1) == together.counts).all()
        expected, found = [], []
        each = alone.rows(np.arange(len(alone)))
        for inputs, targets, asked, length in zip(
            each.inputs, each.targets, each.asked, alone.read.tolist(), strict=True
        ):
            expected.append((inputs[:length].tolist(), targets[:length].tolist(), asked[:length].tolist()))
        for sample, lengths in enumerate(rows.documents):
            assert sum(lengths) == CAPACITY
            first, documents = 0, len(together.packs.of(sample))
            # The filling is a document of its own, without targets.
            assert len(lengths) - documents in (0, 1)
            assert not rows.asked[sample, sum(lengths[:documents]) :].any()
            for length in lengths[:documents]:
                own = slice(first, first + length)
                found.append(
                    tuple(one[sample, own].tolist() for one in (rows.inputs, rows.targets, rows.asked))
                )
                first += length
        assert sorted(found) == sorted(expected)
    assert packed.training.filled > 0.85 > 0.8 > plain.training.filled
