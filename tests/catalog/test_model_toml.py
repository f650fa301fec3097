"""Model files in TOML: everything that a `config.json` of a supported architecture contains, and nothing is dropped."""

import json
from dataclasses import asdict

import pytest
import tomli_w
from hugging_face import MODELS, SEQ_LEN, require_transformers

from pipeloom.catalog import read_model
from pipeloom.catalog.model_files import config_json
from pipeloom.config import ModelConfig
from pipeloom.errors import UserError
from pipeloom.workload.model_families import MODELS as FAMILIES

SIZES = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "ffn_size",
    "vocab": "vocab_size",
}
SMALL = {
    "name": "it",
    "layers": 12,
    "hidden": 16,
    "heads": 4,
    "ffn": 20,
    "family": "llama",
    "vocab": 260,
    "tied": False,
}


def toml_of(model):
    """A model as a TOML file."""
    found = {name: value for name, value in asdict(model).items() if value is not None}
    sizes = {key: found.pop(name) for key, name in SIZES.items()}
    if not FAMILIES[model.family].is_rotary:
        del found["rope_theta"]
    return tomli_w.dumps({"name": "it", **sizes, **found})


def read(path, text):
    path.write_text(text, encoding="utf-8")
    return read_model(str(path), SEQ_LEN).over(ModelConfig()).resolve(2)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_json_in_toml_and_back_is_the_same_model(name, tmp_path):
    transformers = require_transformers()
    kind, settings = MODELS[name]
    given = getattr(transformers, kind)(**settings)
    model = read(tmp_path / "config.json", json.dumps(given.to_dict()))
    again = read(tmp_path / "it.toml", toml_of(model))
    assert again == model
    assert read(tmp_path / "again.json", json.dumps(config_json(again, SEQ_LEN))) == model


def model_of(path, **changes):
    return read(path / "it.toml", tomli_w.dumps({**SMALL, **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_is_what_its_family_has(family, tmp_path):
    found, default = model_of(tmp_path, family=family, window=5), ModelConfig(family=family, num_layers=12)
    assert found.known_attn_softcap == default.known_attn_softcap
    assert found.known_logit_softcap == default.known_logit_softcap
    assert found.known_full_attention_layers == default.known_full_attention_layers
    assert found.window == 5
    assert model_of(tmp_path, family=family).window is None


def test_caps_can_be_left_out_and_layers_with_windows_chosen(tmp_path):
    found = model_of(tmp_path, family="gemma2", attn_softcap=0, window=7, full_attention_layers=[3, 0])
    assert (found.known_attn_softcap, found.known_logit_softcap) == (0, 30)
    assert [layer for layer in range(12) if found.window_of(layer) is None] == [0, 3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window": 0}, "window must be a whole number of at least 1"),
        (
            {"full_attention_layers": [0]},
            "full_attention_layers has no effect without window; set that or leave it out",
        ),
        ({"window": 4, "full_attention_layers": list(range(12))}, "window has no effect where full_attention_layers"),
        ({"window": 4, "full_attention_layers": [12]}, "different whole numbers from 0 to 11, found [12]"),
        ({"window": 4, "full_attention_layers": [1, True]}, "different whole numbers from 0 to 11"),
        ({"window": 4, "rope_local_theta": 1e4}, "rope_local_theta has no effect without family gemma3"),
        ({"family": "gemma3", "rope_local_theta": 1e4}, "rope_local_theta has no effect without window"),
        ({"expert_ffn": 8}, "expert_ffn has no effect without experts"),
        ({"density_block": 4}, "density_block has no effect without density"),
        ({"attn_softcap": -1}, "attn_softcap must be a number of at least 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
        ({"rope_scaling": "dynamic"}, "rope_scaling must be one of linear, llama3, yarn, found 'dynamic'"),
        ({"rope_scaling": "linear"}, "rope_factor must be a number of at least 1"),
        ({"rope_scaling": "yarn", "rope_factor": 2}, "rope_original_len must be a whole number"),
        ({"rope_factor": 2}, "rope_factor has no effect without rope_scaling"),
        (
            {"rope_scaling": "linear", "rope_factor": 2, "rope_slow_turns": 2},
            "rope_slow_turns has no effect without rope_scaling llama3 or yarn",
        ),
        ({"family": "gpt2", "rope_theta": 1e6}, "rope_theta has no effect without a family with rotary positions"),
        ({"layer_types": []}, "there is no key 'layer_types' here"),
    ],
)
def test_what_is_wrong_or_has_no_effect_is_refused_by_name(changes, problem, tmp_path):
    with pytest.raises(UserError) as caught:
        model_of(tmp_path, **changes)
    assert problem in str(caught.value)
