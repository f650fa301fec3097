"""Files ``config.json`` as they are published: the same function here, or every key that differs."""

import json

import pytest

from pipeloom.catalog import load_model, read_model
from pipeloom.catalog.architectures import ARCHITECTURES, ELSEWHERE
from pipeloom.cli import main
from pipeloom.config import ModelConfig, RunConfig
from pipeloom.errors import ConfigError, UserError

# Keys and values of files at huggingface.co, each under the name of its repository there.
LLAMA_3_8B = {  # meta-llama/Meta-Llama-3-8B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = {  # meta-llama/Llama-3.2-1B-Instruct
    **LLAMA_3_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
}
TINY_LLAMA = {  # TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B = {  # mistralai/Mistral-7B-v0.1
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GPT2 = {  # openai-community/gpt2
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
QWEN3_8B = {  # Qwen/Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = {  # Qwen/Qwen2.5-7B
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
OLMO2_7B = {  # allenai/OLMo-2-1124-7B
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0",
    "use_cache": False,
    "vocab_size": 100352,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0}
NEOX_20B = {  # EleutherAI/gpt-neox-20b
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "vocab_size": 50432,
}
GEMMA_2B = {  # google/gemma-2b
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA2_2B = {  # google/gemma-2-2b
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,  # as in the folders of 9B and 27B
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA3_1B = {  # google/gemma-3-1b-it
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
BERT = {  # google-bert/bert-base-uncased
    "architectures": ["BertForMaskedLM"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


@pytest.fixture
def write(tmp_path):
    """Write a table as a file, changed; keys that are ``...`` are left out."""

    def to_file(table, **changes):
        file = tmp_path / "config.json"
        kept = {key: value for key, value in {**table, **changes}.items() if value is not ...}
        file.write_text(json.dumps(kept))
        return str(file)

    return to_file


def problems_of(path, seq_len=None):
    with pytest.raises(ConfigError) as caught:
        read_model(path, seq_len)
    return caught.value.problems


@pytest.mark.parametrize(
    ("table", "parameters"),
    [(LLAMA_3_8B, 8.03e9), (TINY_LLAMA, 1.10e9), (MISTRAL_7B, 7.24e9), ({**GPT2, **NO_DROPOUT}, 124e6)],
    ids=["Llama 3 8B", "TinyLlama", "Mistral 7B", "GPT-2"],
)
def test_a_model_has_as_many_parameters_as_its_authors_count(write, table, parameters):
    assert load_model(write(table)).parameters == pytest.approx(parameters, rel=5e-3)


def test_settings_of_the_function_are_those_of_the_file(write):
    model = read_model(write(LLAMA_3_8B)).over(ModelConfig())
    assert (model.family, model.norm_eps, model.rope_theta, model.tied) == ("llama", 1e-5, 500000.0, False)
    model = read_model(write(LLAMA_3_8B, rms_norm_eps=2e-6, tie_word_embeddings=True)).over(ModelConfig())
    assert (model.norm_eps, model.tied) == (2e-6, True)
    model = read_model(write(GPT2, **NO_DROPOUT, layer_norm_epsilon=3e-6)).over(ModelConfig(rope_theta=7.0))
    assert (model.family, model.norm_eps, model.rope_theta, model.ffn_size) == ("gpt2", 3e-6, 7.0, 3072)


def test_scaled_rotary_positions_are_those_of_the_file(write):
    def scaling(**changes):
        return (
            read_model(write(LLAMA_3_8B, **changes)).over(ModelConfig(rope_scaling="linear", rope_factor=2.0)).scaling
        )

    assert scaling() is None
    llama3 = scaling(rope_scaling=LLAMA_3_2_1B["rope_scaling"])
    assert (llama3.kind, llama3.factor, llama3.original_len, llama3.attention_factor) == ("llama3", 32, 8192, 1)
    assert (llama3.slow_turns, llama3.fast_turns) == (1, 4)
    yarn = scaling(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5})
    assert (yarn.original_len, yarn.slow_turns, yarn.fast_turns) == (LLAMA_3_8B["max_position_embeddings"], 1, 32)
    assert yarn.attention_factor == pytest.approx(1.1386294361)  # arXiv 2309.00071, section 3.3: 0.1 ln(s) + 1
    both = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "linear", "factor": 3}}
    assert problems_of(write(LLAMA_3_8B, **both)) == (
        "rope_scaling and rope_parameters must be equal where a file has both",
    )


def test_qwens_files_are_read(write):
    model = read_model(write(QWEN3_8B)).over(ModelConfig())
    assert (model.family, model.rope_theta, model.known_head_size) == ("qwen3", 1e6, 128)
    assert read_model(write(QWEN3_8B, head_dim=..., hidden_size=2048)).shape.head_size == 128
    assert read_model(write(QWEN25_7B)).shape.family == "qwen2"


def test_heads_have_the_width_of_the_file(write):
    file = read_model(write(MISTRAL_7B, head_dim=160))  # as in Mistral-Nemo-Base-2407
    assert (file.shape.query_width, file.shape.kv_width) == (32 * 160, 8 * 160)
    assert file.over(ModelConfig()).head_size == 160
    assert read_model(write(MISTRAL_7B, head_dim=128)) == read_model(write(MISTRAL_7B))
    assert problems_of(write(MISTRAL_7B, head_dim=65)) == ("rotary positions need an even head_dim, found 65",)


def test_a_missing_key_means_what_its_model_type_means(write):
    keys = ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "num_key_value_heads")
    model = read_model(write(LLAMA_3_8B, **dict.fromkeys(keys, ...))).over(ModelConfig())
    assert (model.norm_eps, model.rope_theta, model.tied, model.num_kv_heads) == (1e-6, 10000.0, False, 32)
    model = read_model(write(GPT2, **NO_DROPOUT, layer_norm_epsilon=...)).over(ModelConfig(norm_eps=1.0))
    assert (model.norm_eps, model.tied) == (1e-5, True)
    assert not read_model(write(GPT2, **NO_DROPOUT, tie_word_embeddings=False)).shape.tied
    assert problems_of(write(GPT2, attn_pdrop=..., embd_pdrop=0, resid_pdrop=0)) == (
        "attn_pdrop must be 0, as nothing is dropped here, found none, which means 0.1",
    )


def test_the_base_of_rotary_positions_is_found_where_transformers_5_writes_it(write):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert read_model(write(LLAMA_3_8B, rope_theta=..., rope_parameters=rope)).rope_theta == 500000.0
    assert read_model(write(LLAMA_3_8B, rope_parameters=rope)).rope_theta == 500000.0
    (problem,) = problems_of(write(LLAMA_3_8B, rope_theta=10000.0, rope_parameters=rope))
    assert problem == "rope_theta must be one number, found 500000 in rope_parameters and 10000 in rope_theta"


@pytest.mark.parametrize(
    "table",
    [
        NEOX_20B,
        GEMMA_2B,
        BERT,
        {**LLAMA_3_8B, "model_type": "gemma3"},
        {**LLAMA_3_8B, "model_type": "deepseek_v3", "n_routed_experts": 8},
    ],
    ids=lambda table: table["model_type"],
)
def test_another_architecture_is_refused_by_name_with_its_reason(write, table):
    (problem,) = problems_of(write(table))
    name = table["model_type"]
    known = f'model_type must be one of {", ".join(ARCHITECTURES)}, found "{name}": '
    assert problem == f"{known}{ELSEWHERE[name]}, which is not supported"


@pytest.mark.parametrize(
    ("found", "shown"),
    [("falcon_h1", '"falcon_h1"'), (..., "none"), (None, "null"), (7, "7"), (["llama"], '["llama"]')],
)
def test_an_architecture_that_is_not_listed_or_not_named_is_refused(write, found, shown):
    assert problems_of(write(LLAMA_3_8B, model_type=found)) == (
        f"model_type must be one of {', '.join(ARCHITECTURES)}, found {shown}",
    )


WHOLE = "must be a whole number of at least 1"
ABOVE = "must be a number above 0"
NO_BIAS = "must be false, as these matrices have no biases here"
KNOWN = "must be null or of rope_type default, linear, llama3, yarn, with the same settings in all layers"
NOT_DROPPED = "must be 0, as nothing is dropped here"
HEAD = "as models here end with a head over the vocabulary"
WRONG = {
    "llama": [
        ("hidden_act", "gelu", 'must be "silu", as the gate of SwiGLU'),
        ("attention_bias", True, NO_BIAS),
        ("mlp_bias", True, NO_BIAS),
        ("attention_dropout", 0.1, NOT_DROPPED),
        ("attention_dropout", False, NOT_DROPPED),
        ("head_dim", 0, WHOLE),
        ("partial_rotary_factor", 0.5, "must be 1, as rotary positions turn whole heads here"),
        ("sliding_window", 4096, "must be null, as llama has no windows"),
        ("use_sliding_window", True, "must be false, as it has no windows"),
        ("layer_types", ["sliding_attention"], "must be null, or full_attention for each of 32 layers"),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}, KNOWN),
        ("rope_scaling", {"type": "yarn"}, "must be a table whose factor is a number above 0"),
        (
            "rope_scaling",
            {"type": "yarn", "factor": 4.0, "mscale": 1.0},
            "must be a table with no mscale, which rope_type yarn does not have here",
        ),
        (
            "rope_scaling",
            {"type": "llama3", "factor": 4.0, "low_freq_factor": 1},
            "must be a table whose high_freq_factor is a number above 0",
        ),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "default"}},
            "must be a table with no full_attention, which rope_type default does not have here",
        ),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "must be a table with whole heads turned"),
        ("rope_parameters", {"rope_theta": 0}, "must be a table whose rope_theta is a number above 0"),
        ("rope_theta", 0, ABOVE),
        ("rms_norm_eps", float("inf"), f"{ABOVE} and at most 1e+100"),
        ("architectures", ["LlamaForSequenceClassification"], f'must be ["LlamaForCausalLM"], {HEAD}'),
        ("quantization_config", {"bits": 4}, "must be null, as weights are not quantized here"),
        ("auto_map", {"AutoModel": "own.Own"}, "must be null, as code that comes with a model is not run here"),
        ("qk_norm", True, "is not a supported key of llama"),
        ("num_attention_heads", 24, "must divide hidden_size"),
        ("num_key_value_heads", 5, "must divide num_attention_heads"),
        ("hidden_size", ..., WHOLE),
    ],
    "mistral": [
        ("num_key_value_heads", ..., WHOLE),
        ("sliding_window", "wide", "must be null or a whole number of at least 1"),
        ("layer_types", ["full_attention"], "must be null, or sliding_attention for each of 32 layers"),
    ],
    "gemma2": [
        ("sliding_window", None, "must be a whole number of at least 1, as some layers have a window"),
        (
            "layer_types",
            ["full_attention"],
            "must be null, or full_attention or sliding_attention for each of 26 layers",
        ),
        ("hidden_activation", "silu", 'must be "gelu_pytorch_tanh", the tanh form of GELU'),
        ("use_bidirectional_attention", True, "must be false, as tokens here see earlier ones only"),
        ("attn_logit_softcapping", 0, ABOVE),
        ("query_pre_attn_scalar", 24.5, WHOLE),
        ("attention_bias", True, NO_BIAS),
        ("sliding_window_pattern", 2, "is not a supported key of gemma2"),
        ("rope_local_base_freq", 1e4, "is not a supported key of gemma2"),
    ],
    "gemma3_text": [
        ("attn_logit_softcapping", 50.0, "must be null, as this architecture bounds no attention scores"),
        ("sliding_window_pattern", 0, "must be a whole number of at least 1"),
        ("rope_local_base_freq", 0, ABOVE),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}, KNOWN),
        (
            "rope_parameters",
            {"rope_type": "default"},
            "must be null or a table with a table full_attention and a table sliding_attention",
        ),
        (
            "rope_parameters",
            {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}},
            "must be a table whose sliding_attention has plain positions, of rope_type default",
        ),
        (
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5.0}},
            "must be a table whose sliding_attention has the rope_theta 10000 of rope_local_base_freq",
        ),
    ],
    "qwen2": [
        ("use_sliding_window", "yes", "must be true or false"),
        ("layer_types", ["sliding_attention"], "must be null, or full_attention for each of 28 layers"),
        ("attention_bias", False, "is not a supported key of qwen2"),
        ("num_key_value_heads", ..., WHOLE),
    ],
    "qwen3": [("attention_bias", True, NO_BIAS), ("mlp_bias", False, "is not a supported key of qwen3")],
    "olmo2": [("sliding_window", 4096, "is not a supported key of olmo2"), ("attention_bias", True, NO_BIAS)],
    "gpt2": [
        ("activation_function", "gelu", 'must be "gelu_new", the tanh form of GELU'),
        ("resid_pdrop", 0.1, NOT_DROPPED),
        ("scale_attn_weights", False, "must be true, as attention here divides by the root of the head's size"),
        ("scale_attn_by_inverse_layer_idx", True, "must be false, as attention here is scaled alike in all layers"),
        ("add_cross_attention", True, "must be false, as models here are decoders"),
        ("n_head", 7, "must divide n_embd"),
    ],
}
RIGHT = {
    "gemma2": GEMMA2_2B,
    "gemma3_text": GEMMA3_1B,
    "olmo2": OLMO2_7B,
    "qwen3": QWEN3_8B,
    "qwen2": QWEN25_7B,
    "llama": LLAMA_3_8B,
    "mistral": MISTRAL_7B,
    "gpt2": {**GPT2, **NO_DROPOUT},
}


@pytest.mark.parametrize(
    ("name", "key", "value", "sentence"), [(name, *one) for name, wrong in WRONG.items() for one in wrong]
)
def test_a_key_that_changes_the_function_is_refused_by_name(write, name, key, value, sentence):
    read_model(write(RIGHT[name]))  # without the change it is accepted
    (problem,) = problems_of(write(RIGHT[name], **{key: value}))
    assert problem.startswith(f"{key} {sentence}, found ")
    shown = ["None"] if value is ... else [json.dumps(value), repr(value)]
    assert any(f", found {one}" in problem for one in shown)


def test_every_key_that_changes_the_function_is_in_one_message(write):
    path = write(LLAMA_3_2_1B, rope_scaling=[], attention_bias=True, hidden_act="relu", logits_scaling=8.0)
    assert [problem.split()[0] for problem in problems_of(path)] == [
        "rope_scaling",
        "hidden_act",
        "attention_bias",
        "logits_scaling",
    ]


def test_nothing_of_a_file_is_a_command_for_a_terminal(write):
    problems = problems_of(write(LLAMA_3_8B, **{"a\x1b[2Jb": "\x9b2J\ud800", "hidden_act": "\x1b[2J"}))
    assert all(problem.isprintable() and problem.isascii() for problem in problems)
    assert len(problems) == 2


def test_a_long_value_is_cut(write):
    (problem,) = problems_of(write(LLAMA_3_8B, quantization_config={"modules": ["q_proj"] * 500}))
    assert len(problem) < 200


def windows_of(path, layers):
    model = read_model(path).over(ModelConfig())
    return [model.window_of(layer) for layer in range(layers)]


def test_windows_are_those_of_the_rules_of_each_architecture(write):
    assert windows_of(write(MISTRAL_7B), 32) == [4096] * 32
    assert windows_of(write(MISTRAL_7B, sliding_window=...), 32) == [4096] * 32
    assert windows_of(write(MISTRAL_7B, sliding_window=None), 32) == [None] * 32
    assert windows_of(write(QWEN25_7B), 28) == [None] * 28
    assert windows_of(write(QWEN25_7B, use_sliding_window=True), 28) == [None] * 28
    upper = {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 100}
    assert windows_of(write(QWEN25_7B, **upper), 28) == [None] * 20 + [100] * 8
    kinds = ["sliding_attention"] + ["full_attention"] * 27
    assert windows_of(write(QWEN25_7B, **upper, layer_types=kinds), 28) == [100] + [None] * 27
    assert windows_of(write(GEMMA2_2B), 26) == [4096, None] * 13
    assert windows_of(write(GEMMA3_1B), 26) == [512, 512, 512, 512, 512, None] * 4 + [512, 512]
    kinds = ["full_attention"] * 26
    assert windows_of(write(GEMMA3_1B, layer_types=kinds, sliding_window=None), 26) == [None] * 26


def test_gemmas_files_are_read(write):
    model = read_model(write(GEMMA2_2B)).over(ModelConfig())
    assert (model.family, model.tied, model.known_head_size, model.query_pre_attn_scalar) == ("gemma2", True, 256, None)
    assert (model.known_attn_softcap, model.known_logit_softcap) == (50.0, 30.0)
    changed = {"attn_logit_softcapping": None, "final_logit_softcapping": 20, "query_pre_attn_scalar": 144}
    model = read_model(write(GEMMA2_2B, **changed)).over(ModelConfig())
    assert (model.known_attn_softcap, model.known_logit_softcap, model.attention_scale) == (0, 20, 1 / 12)
    model = read_model(write(GEMMA3_1B)).over(ModelConfig())
    assert (model.known_attn_softcap, model.known_logit_softcap) == (0, 0)
    assert (model.rope_theta, model.known_rope_local_theta, model.scaling) == (1e6, 1e4, None)
    bare = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ...)
    tables = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    model = read_model(write(GEMMA3_1B, **bare, rope_parameters=tables)).over(ModelConfig())
    assert (model.rope_theta, model.known_rope_local_theta, model.scaling.factor) == (5e5, 2e4, 8)
    assert read_model(write(GEMMA3_1B, **bare)) == read_model(write(GEMMA3_1B))


def test_the_table_of_positions_has_as_many_rows_as_sequences_have_tokens(write):
    path = write(GPT2, **NO_DROPOUT)
    assert read_model(path, 1024)
    for seq_len in (512, 2048):
        (problem,) = problems_of(path, seq_len)
        assert problem.startswith(f"n_positions must be {seq_len}, the tokens of a sequence,")
        assert problem.endswith("found 1024")


def test_what_a_key_has_to_be_is_among_the_keys_of_its_architecture():
    for known in ARCHITECTURES.values():
        assert set(known.fixed) <= known.keys
        assert not set(known.fixed) & known.unused
        assert all(len(fixed.values) >= 1 for fixed in known.fixed.values())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "expected an object, found list"),
        ("{", "Expecting property name"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" * 100_000, "nested deeper than 64 levels"),
    ],
)
def test_a_file_that_is_no_object_is_refused(tmp_path, text, why):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UserError, match=why):
        read_model(str(file))


@pytest.mark.parametrize("shown", ["nosuch.json", "nosuch.toml"])
def test_a_file_that_is_not_there_is_named_once(tmp_path, shown):
    path = str(tmp_path / shown)
    with pytest.raises(UserError) as caught:
        read_model(path)
    assert str(caught.value).count(shown) == 1


ON_CLUSTER = ["--cluster", "laptop", "--devices", "1"]
COMMANDS = {
    "train": lambda path: ["train", "--model.file", path],
    "verify": lambda path: ["verify", "--model.file", path],
    "simulate": lambda path: ["simulate", "--model.file", path],
    "slices": lambda path: ["slices", "--model.file", path],
    "launch": lambda path: ["launch", "--model.file", path],
    "plan": lambda path: ["plan", "--model", path, "--seq", "128", "--global-batch", "8", *ON_CLUSTER],
    "tradeoff": lambda path: ["tradeoff", "--model", path, "--seq", "128", "--cluster", "dgx-a100", "--devices", "8"],
    "profile": lambda path: ["profile", "--model", path, "--seq", "128"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_such_a_file_alike(write, command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(LLAMA_3_2_1B, rope_scaling={"type": "dynamic"})
    assert main(COMMANDS[command](path)) == 2
    err = capsys.readouterr().err
    assert f"  - {path}: rope_scaling must be null or of rope_type default, " in err
    assert "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_the_sequences_of_a_plan_are_those_of_its_flag(write, tmp_path, capsys):
    path = write(GPT2, **NO_DROPOUT, n_positions=16, n_embd=64, n_head=4, n_layer=2, vocab_size=99)
    run = tmp_path / "run.toml"
    run.write_text(f'[model]\nfile = "{path}"\n[data]\nseq_len = 16\n[layout]\npp = 1\n')
    words = ["--best", "1", "--no-explain", "--families", "gpipe", *ON_CLUSTER]
    assert main(["plan", str(run), "--seq", "17", *words]) == 2
    assert capsys.readouterr().err.count("n_positions must be 17") == 1
    assert main(["plan", str(run), *words]) == 0
    assert RunConfig().data.seq_len > 16  # what a file without seq_len would be read with


def test_a_plan_calls_wrong_heads_of_a_run_file_what_they_are(tmp_path, capsys):
    run = tmp_path / "run.toml"
    run.write_text("[model]\nnum_heads = 7\nnum_kv_heads = 2\nnum_layers = 0\n")
    assert main(["plan", str(run), *ON_CLUSTER]) == 2
    err = capsys.readouterr().err
    assert "model.num_heads must divide model.hidden_size, found 7 and 192" in err
    assert "model.num_kv_heads must divide model.num_heads, found 2 and 7" in err
    assert "model.num_layers must be at least 1, found 0" in err
