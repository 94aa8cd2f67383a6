"""Mistakes in TOML files, in the words of the file."""

from pathlib import Path

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.reading import _OTHER_WORDS, _fields_at, holds_json, read_json, read_text
from weft.describe.run_file import RunFile, parse_run
from weft.errors import InputError


def mistakes(**tables: object) -> list[str]:
    with pytest.raises(InputError) as refused:
        parse_run({"model": {"preset": "gpt-1m"}, **tables})
    return [str(one).partition("; allowed are ")[2] or str(one) for one in refused.value.violations]


def test_a_key_of_another_table_is_sent_there_and_a_misspelt_one_to_the_nearest() -> None:
    (told,) = mistakes(train={"learning_rate": 1e-3})
    assert told.endswith("; it is a key of [optimizer]")
    (told,) = mistakes(train={"step": 3})
    assert told.endswith("(nearest valid: steps)")


def test_a_number_in_quotes_is_named_without_them() -> None:
    (told,) = mistakes(train={"steps": "16"})
    assert told.endswith("'16': must be a valid integer (nearest valid: 16)")
    (told,) = mistakes(train={"steps": "many"})
    assert "nearest" not in told


def test_a_byte_order_mark_is_no_text(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("name,layers\n", encoding="utf-8-sig")
    assert read_text(tmp_path / "rows.csv") == "name,layers\n"


def test_a_key_given_twice_is_refused(tmp_path) -> None:
    """The second one would replace the first without a word."""
    path = tmp_path / "plan.json"
    path.write_text('{"a": {"b": 1}, "c": {"b": 2}}')
    assert read_json(path) == {"a": {"b": 1}, "c": {"b": 2}}
    path.write_text('{"a": {"b": 1, "c": 3, "b": 2}}')
    with pytest.raises(InputError, match=r"plan.json: not a JSON file: key 'b' is given more than once"):
        read_json(path)


def test_words_of_other_trainers_are_sent_to_the_key_that_is_meant() -> None:
    (told,) = mistakes(optimizer={"lr": 1e-3})
    assert told.endswith("(nearest valid: learning_rate)")
    (told,) = mistakes(train={"gradient_clip_val": 1.0})
    assert told.endswith("; clip_norm is a key of [optimizer]")


def test_every_meant_word_is_a_key_of_a_run_file() -> None:
    keys = {key for table in _fields_at(RunFile, ()) for key in _fields_at(RunFile, (table,))}
    assert {*_OTHER_WORDS.values()} <= keys
    assert not keys & {*_OTHER_WORDS}


def test_lists_are_named_in_the_words_of_files() -> None:
    (told,) = mistakes(report={"log": "wandb"})
    assert told == "run: report.log: 'wandb': must be a list"


def test_a_price_is_sent_to_its_device(tmp_path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\nname = "a"\ncount = 1\ndevice = "t4"\ndevices = 2\nprice_per_hour = 2\n')
    with pytest.raises(InputError, match=r"node\[0\].price_per_hour: .*; it is a key of \[device\]"):
        parse_cluster(str(file))


@pytest.mark.parametrize("name", ["run.toml", "run.txt", "run", "plan.json.bak"])
@pytest.mark.parametrize(
    ("text", "is_json"), [("[model]\n", False), ("", False), ('\n {"plan_id": "1"}', True)]
)
def test_the_content_tells_a_run_file_from_a_plan_file(
    name: str, text: str, is_json: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert holds_json(tmp_path / name) == is_json


def test_a_file_that_is_neither_is_refused_unless_its_name_tells_which_reader_it_is_for(
    tmp_path: Path,
) -> None:
    for name in ("notes.txt", "notes.toml", "notes.json"):
        (tmp_path / name).write_text("dear diary")
    with pytest.raises(InputError, match=r"notes.txt: neither TOML, as run files, nor a JSON object"):
        holds_json(tmp_path / "notes.txt")
    assert (holds_json(tmp_path / "notes.toml"), holds_json(tmp_path / "notes.json")) == (False, True)
