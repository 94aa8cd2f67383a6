"""Models by name and from config.json: transformers' own files are read, broken ones listed in full."""

import json

import pytest
from transformers import GPT2Config, LlamaConfig

from weft.describe.families import layer_graph
from weft.describe.models import PRESETS, USUAL_SEQUENCE, resolve_model
from weft.errors import InputError

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}


def write(folder, record):
    path = folder / "config.json"
    path.write_text(json.dumps(record))
    return str(path)


# Published counts: GPT-2 124M; BFPP 6.6B and 52B; Llama papers.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("gpt-6.6b", 6.66),
        ("gpt-52b", 52.0),
        ("gpt3-175b", 174.6),
        ("llama-1b", 1.236),
        ("llama-7b", 6.74),
        ("llama-13b", 13.02),
        ("llama-30b", 32.53),
        ("llama-65b", 65.29),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3-405b", 405.85),
        ("bert-base", 0.1095),
        ("bert-large", 0.3352),
        ("vit-tiny", 0.00572),
        ("vit-base", 0.0866),
        ("resnet-18", 0.011689512),
        ("resnet-34", 0.021797672),
        ("resnet-50", 0.025557032),
        ("vgg-11", 0.132863336),
        ("vgg-13", 0.133047848),
        ("vgg-16", 0.138357544),
        ("vgg-19", 0.143667240),
        ("alexnet", 0.061100840),
    ],
)
def test_presets_have_their_published_size(name, billions):
    assert layer_graph(PRESETS[name]).parameters() / 1e9 == pytest.approx(billions, rel=0.005)


def test_every_preset_divides_evenly():
    for name, config in PRESETS.items():
        assert config.name == name
        if not config.heads:
            continue
        assert config.hidden % config.heads == 0
        assert config.heads % config.key_value_heads == 0


@pytest.mark.parametrize("config_class", [GPT2Config, LlamaConfig])
def test_a_file_written_by_transformers_is_read(tmp_path, config_class):
    config_class().save_pretrained(tmp_path)
    config = resolve_model(str(tmp_path))
    assert config == resolve_model(str(tmp_path / "config.json"))
    assert config.name == tmp_path.name
    real = config_class()
    assert (config.hidden, config.layers, config.vocabulary) == (
        real.hidden_size,
        real.num_hidden_layers,
        real.vocab_size,
    )
    assert config.tied_embeddings == real.tie_word_embeddings


@pytest.mark.parametrize(("record", "tied"), [(GPT2, True), (LLAMA, False)])
def test_an_absent_tie_takes_the_default_of_transformers(tmp_path, record, tied):
    assert resolve_model(write(tmp_path, record)).tied_embeddings is tied
    opposite = {**record, "tie_word_embeddings": not tied}
    assert resolve_model(write(tmp_path, opposite)).tied_embeddings is not tied


def test_sequence_replaces_the_longest():
    assert resolve_model("llama-13b", sequence=8192).sequence == 8192
    assert resolve_model("gpt-1m", sequence=64).sequence == 64
    with pytest.raises(InputError, match="at least 1 token"):
        resolve_model("gpt-1m", sequence=0)


def test_learned_positions_bound_the_sequence_of_a_file(tmp_path):
    path = write(tmp_path, GPT2)
    assert resolve_model(path, sequence=8).sequence == 8
    with pytest.raises(InputError, match="nearest valid: 16"):
        resolve_model(path, sequence=17)
    assert resolve_model(write(tmp_path, LLAMA), sequence=64).sequence == 64


@pytest.mark.parametrize(
    ("name", "near"), [("lama-13b", "llama-13b"), ("GPT2", "gpt2"), ("gpt-10", "gpt-10m")]
)
def test_an_unknown_name_gets_the_nearest(name, near):
    with pytest.raises(InputError, match=f"nearest valid: {near}"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "no/such/folder"])
def test_names_that_are_not_even_paths_are_refused(name):
    with pytest.raises(InputError):
        resolve_model(name)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        resolve_model(str(tmp_path))


def test_everything_wrong_is_listed_at_once(tmp_path):
    record = {
        **LLAMA,
        "hidden_size": 17,
        "num_hidden_layers": 0,
        "vocab_size": True,
        "num_key_value_heads": 3,
        "sliding_window": 8,
        "tie_word_embeddings": "yes",
    }
    del record["intermediate_size"]
    with pytest.raises(InputError) as refused:
        resolve_model(write(tmp_path, record))
    places = sorted(violation.where.rpartition(" ")[2] for violation in refused.value.violations)
    assert places == [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "sliding_window",
        "tie_word_embeddings",
        "vocab_size",
    ]


@pytest.mark.parametrize("record", [[], 3, None, {}, {"model_type": "mistral"}, {"model_type": ["gpt2"]}])
def test_other_kinds_of_file_are_refused(tmp_path, record):
    with pytest.raises(InputError):
        resolve_model(write(tmp_path, record))


def test_a_window_in_a_config_is_not_read_over(tmp_path):
    assert resolve_model(write(tmp_path, {**LLAMA, "sliding_window": None})).family == "llama"
    with pytest.raises(InputError) as refused:
        resolve_model(write(tmp_path, {**LLAMA, "sliding_window": 4096}))
    assert str(refused.value).endswith("sliding_window: 4096 is not supported (nearest valid: null)")


def test_a_head_size_of_its_own_is_read(tmp_path):
    own = resolve_model(write(tmp_path, {**LLAMA, "head_dim": 8}))
    assert own.decoder is not None
    assert own.decoder.head_size == 8
    with pytest.raises(InputError, match="head_dim"):
        resolve_model(write(tmp_path, {**LLAMA, "head_dim": -8}))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 46.70), ("qwen3-30b-a3b", 30.53), ("olmoe-1b-7b", 6.92), ("deepseek-v3", 671.03)],
)
def test_mixtures_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    assert round(layer_graph(PRESETS[name]).parameters() / 1e9, 2) == billions
    assert PRESETS[name].sequence <= USUAL_SEQUENCE
