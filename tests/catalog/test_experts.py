"""Experts in files: of models as they are published, in the catalog's format, and of measured layers."""

import json
from dataclasses import replace

import pytest

from pipeloom.catalog import cluster_to_toml, load_cluster, load_model, read_model
from pipeloom.config import ModelConfig
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.errors import ConfigError
from pipeloom.workload.model_shape import Experts
from pipeloom.workload.run import Run

MIXTRAL_8X7B = {  # mistralai/Mixtral-8x7B-v0.1
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture
def write(tmp_path):
    def write(table, **changes):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({key: one for key, one in {**table, **changes}.items() if one is not ...}))
        return str(file)

    return write


def problems_of(path):
    with pytest.raises(ConfigError) as error:
        read_model(path)
    return error.value.problems


@pytest.mark.parametrize(("table", "name"), [(MIXTRAL_8X7B, "mixtral-8x7b"), (QWEN3_30B, "qwen3-30b-a3b")])
def test_published_files_are_the_models_of_the_catalog(write, table, name):
    own, known = read_model(write(table)).over(ModelConfig()), read_model(name).over(ModelConfig())
    assert own == known
    assert load_model(write(table)) == replace(load_model(name), name=table["model_type"])


def test_a_name_of_transformers_5_is_read(write):
    assert load_model(write(QWEN3_30B, num_experts=..., num_local_experts=64)).experts.count == 64


@pytest.mark.parametrize(
    ("table", "changes", "problem"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts, found 9"),
        (
            MIXTRAL_8X7B,
            {"router_jitter_noise": 0.1},
            "router_jitter_noise must be 0, as scores have no noise here, found 0.1",
        ),
        (
            QWEN3_30B,
            {"norm_topk_prob": ...},
            (
                "norm_topk_prob must be true, as the weights of a token's experts add up to 1 here, found none, which "
                "means false"
            ),
        ),
        (
            QWEN3_30B,
            {"mlp_only_layers": [0]},
            "mlp_only_layers must be [], as decoder_sparse_step selects the layers with experts, found [0]",
        ),
        (
            QWEN3_30B,
            {"num_local_experts": 64},
            "num_experts and num_local_experts must be equal where a file has both",
        ),
    ],
)
def test_what_is_not_computed_here_is_refused(write, table, changes, problem):
    assert problems_of(write(table, **changes)) == (problem,)


def test_measured_layers_with_experts_are_not_those_without(tmp_path):
    shape = replace(load_model("mixtral-8x7b"), experts=Experts(count=8, per_token=2, ffn=14336, shared=1))
    run = Run(shape=shape, seq=128, precision="bf16").of_measured_pieces
    measured = MeasuredPieces(run=run, embedding=(1e-6, 1e-6), layer=(2e-6, 4e-6), head=(1e-6, 1e-6))
    file = tmp_path / "here.toml"
    file.write_text(cluster_to_toml(replace(load_cluster("dgx-h100"), pieces=(measured,), name="here")))
    (found,) = load_cluster(str(file)).pieces
    assert found.run == run
    assert found.run != replace(run, shape=replace(run.shape, experts=None))
