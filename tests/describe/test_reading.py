"""Mistakes in TOML files, in the words of the file."""

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.run_file import parse_run
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


def test_a_price_is_sent_to_its_device(tmp_path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\nname = "a"\ncount = 1\ndevice = "t4"\ndevices = 2\nprice_per_hour = 2\n')
    with pytest.raises(InputError, match=r"node\[0\].price_per_hour: .*; it is a key of \[device\]"):
        parse_cluster(str(file))
