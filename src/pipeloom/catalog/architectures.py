"""Supported Hugging Face architectures: required values, and keys without an effect, of their ``config.json``.

Sources are transformers 4 and 5: ``configuration_*.py`` of each model for defaults of missing keys, ``modeling_*.py``
for their effects, ``configuration_utils.py`` for keys that all models have.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from pipeloom.catalog.weight_files import (
    GEMMA_WEIGHTS,
    GPT2_WEIGHTS,
    LLAMA_WEIGHTS,
    MIXTRAL_WEIGHTS,
    OLMO2_WEIGHTS,
    QWEN3_MOE_WEIGHTS,
    WeightFiles,
)
from pipeloom.registry import Registry
from pipeloom.workload.model_families import MODELS, ModelFamily


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class Fixed:
    """A key that must have one of some equivalent values.

    Attributes:
        values: the supported values; messages contain the first one.
        why: the reason, for messages.
        default: value of a missing key.
    """

    values: tuple[Any, ...]
    why: str
    default: Any


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """The keys of an architecture whose layers have experts.

    Attributes:
        counts: names of the number of experts, the first of which is written, and its default.
        per_token: default of ``num_experts_per_tok``.
        ffn: name and default of the inner width of an expert; ``None`` where it is that of any block.
        every: name of the number of layers of which the last has experts, 1 by default; ``None`` where all have.
    """

    counts: tuple[tuple[str, ...], int]
    per_token: int
    ffn: tuple[str, int] | None = None
    every: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Names of all keys."""
        named = [*self.counts[0], "num_experts_per_tok", self.every, None if self.ffn is None else self.ffn[0]]
        return frozenset(name for name in named if name is not None)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The keys of files of one ``model_type``.

    Attributes:
        classes: supported values of ``architectures``: the model with a head over the vocabulary.
        layers, hidden, heads, ffn, eps: names of the keys of the sizes and of the norm's epsilon.
        family: key of ``MODELS``; determines whether positions are rotary or learned.
        tied, default_eps: values of missing keys.
        fixed: keys that must have a certain value.
        used: further keys that ``model_files`` reads.
        unused: keys without an effect on the model's function, in addition to ``UNUSED``.
        weights: the tensors of its weight files.
        window: value of a missing ``sliding_window``; ``None`` for architectures without windows.
        windowed: which layers have one (``catalog.config_windows``).
        query_scalar: value of a missing ``query_pre_attn_scalar``; ``None`` for architectures without the key.
        attn_softcap, logit_softcap: values of missing ``attn_logit_softcapping`` and ``final_logit_softcapping``;
            ``None`` for architectures that do not read them.
        head_size: value of a missing ``head_dim``; ``None`` for an equal share of ``hidden``.
        groups_follow: whether a missing ``num_key_value_heads`` means as many as query heads, not a fixed number.
        experts: the keys of experts; ``None`` for architectures without them.
    """

    classes: tuple[str, ...]
    layers: str
    hidden: str
    heads: str
    ffn: str
    eps: str
    family: str
    tied: bool
    default_eps: float
    fixed: Mapping[str, Fixed]
    used: frozenset[str]
    unused: frozenset[str]
    weights: WeightFiles
    window: int | None = None
    windowed: Literal["none", "all", "upper", "pattern"] = "none"
    query_scalar: int | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    head_size: int | None = None
    groups_follow: bool = True
    experts: ExpertKeys | None = None

    @property
    def model_family(self) -> ModelFamily:
        """The entry of ``MODELS``."""
        return MODELS[self.family]

    @property
    def keys(self) -> frozenset[str]:
        """All supported keys of a file."""
        sizes = {self.layers, self.hidden, self.heads, self.ffn, self.eps, "vocab_size", "tie_word_embeddings"}
        experts = frozenset[str]() if self.experts is None else self.experts.keys
        return UNUSED | self.used | self.unused | sizes | set(self.fixed) | experts


_ALL = MappingProxyType(
    {
        "is_encoder_decoder": Fixed((False,), "as models here are decoders", default=False),
        "add_cross_attention": Fixed((False,), "as models here are decoders", default=False),
        "cross_attention_hidden_size": Fixed((None,), "as models here are decoders", None),
        "pruned_heads": Fixed(({}, None), "as no head is pruned here", {}),
        "quantization_config": Fixed((None,), "as weights are not quantized here", None),
        "auto_map": Fixed((None,), "as code that comes with a model is not run here", None),
    }
)
UNUSED = _keys(
    "model_type architectures _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype "
    "use_bfloat16 torchscript tf_legacy_loss return_dict output_attentions output_hidden_states output_past use_cache "
    "is_decoder tie_encoder_decoder chunk_size_feed_forward initializer_range gradient_checkpointing "
    "_attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled "
    "tokenizer_class prefix bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id "
    "task_specific_params problem_type finetuning_task id2label label2id num_labels "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
)
"""Keys of all models without an effect: origin of the file, types, kernels, tokens, generation, initialization."""

_LLAMA_FIXED = MappingProxyType(
    {
        **_ALL,
        "hidden_act": Fixed(("silu", "swish"), "as the gate of SwiGLU", "silu"),
        "attention_bias": Fixed((False,), "as these matrices have no biases here", default=False),
        "mlp_bias": Fixed((False,), "as these matrices have no biases here", default=False),
        "attention_dropout": Fixed((0, None), "as nothing is dropped here", 0),
        "partial_rotary_factor": Fixed((1, None), "as rotary positions turn whole heads here", 1),
        "use_sliding_window": Fixed((False, None), "as it has no windows", default=False),
    }
)
_LLAMA_NAMES: Mapping[str, Any] = MappingProxyType(
    {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "eps": "rms_norm_eps",
        "default_eps": 1e-6,
        "family": "llama",
        "tied": False,
        "fixed": _LLAMA_FIXED,
        "used": _keys(
            "num_key_value_heads head_dim sliding_window layer_types rope_theta rope_scaling rope_parameters"
        ),
        # Rotary angles need no limit of positions; pretraining_tp only splits matrix products.
        "unused": _keys("max_position_embeddings max_sequence_length pretraining_tp"),
        "weights": LLAMA_WEIGHTS,
    }
)


def _qwen(family: str, name: str, without: Collection[str]) -> Architecture:
    """One of Qwen's architectures, which lack some keys of llama's."""
    settings: dict[str, Any] = {
        **_LLAMA_NAMES,
        "family": family,
        "groups_follow": False,
        "window": 4096,
        "windowed": "upper",
        "fixed": {
            **{key: value for key, value in _LLAMA_FIXED.items() if key not in without},
            "use_mrope": Fixed((False,), "as positions of a text have one number here", default=False),
        },
        "used": _LLAMA_NAMES["used"] | {"use_sliding_window", "max_window_layers"},
    }
    return Architecture(classes=(name,), **settings)


_GPT2_DROPOUT = Fixed((0,), "as nothing is dropped here", 0.1)

ARCHITECTURES: Registry[Architecture] = Registry("model_type", "", Architecture)
"""Architectures by ``model_type``. A plug-in with a family of models adds its architectures here."""
ARCHITECTURES.add("llama", Architecture(classes=("LlamaForCausalLM",), **_LLAMA_NAMES))
ARCHITECTURES.add(
    "mistral",
    Architecture(classes=("MistralForCausalLM",), window=4096, windowed="all", groups_follow=False, **_LLAMA_NAMES),
)
ARCHITECTURES.add(
    "qwen2", _qwen("qwen2", "Qwen2ForCausalLM", without=("attention_bias", "mlp_bias", "use_sliding_window"))
)
ARCHITECTURES.add(
    "qwen3", replace(_qwen("qwen3", "Qwen3ForCausalLM", without=("mlp_bias", "use_sliding_window")), head_size=128)
)
# The balance loss of transformers, and whether scores are returned.
_ROUTING = _keys("output_router_logits router_aux_loss_coef")
ARCHITECTURES.add(
    "mixtral",
    replace(
        ARCHITECTURES["mistral"],
        classes=("MixtralForCausalLM",),
        window=None,
        default_eps=1e-5,
        fixed={**_LLAMA_FIXED, "router_jitter_noise": Fixed((0,), "as scores have no noise here", 0.0)},
        unused=_LLAMA_NAMES["unused"] | _ROUTING,
        weights=MIXTRAL_WEIGHTS,
        experts=ExpertKeys(counts=(("num_local_experts",), 8), per_token=2),
    ),
)
ARCHITECTURES.add(
    "qwen3_moe",
    replace(
        ARCHITECTURES["qwen3"],
        classes=("Qwen3MoeForCausalLM",),
        head_size=None,
        fixed={
            **ARCHITECTURES["qwen3"].fixed,
            "norm_topk_prob": Fixed((True,), "as the weights of a token's experts add up to 1 here", default=False),
            "mlp_only_layers": Fixed(([], None), "as decoder_sparse_step selects the layers with experts", None),
        },
        unused=_LLAMA_NAMES["unused"] | _ROUTING,
        weights=QWEN3_MOE_WEIGHTS,
        # transformers 5 writes another name than 4, and reads both.
        experts=ExpertKeys(
            counts=(("num_experts", "num_local_experts"), 128),
            per_token=8,
            ffn=("moe_intermediate_size", 768),
            every="decoder_sparse_step",
        ),
    ),
)
ARCHITECTURES.add(
    "olmo2",
    replace(
        ARCHITECTURES["llama"],
        classes=("Olmo2ForCausalLM",),
        family="olmo2",
        default_eps=1e-5,
        fixed={key: one for key, one in _LLAMA_FIXED.items() if key not in ("mlp_bias", "use_sliding_window")},
        used=_LLAMA_NAMES["used"] - {"sliding_window"},
        weights=OLMO2_WEIGHTS,
    ),
)
_GELU = Fixed(("gelu_pytorch_tanh", "gelu_new"), "the tanh form of GELU", "gelu_pytorch_tanh")


def _gemma(family: str, name: str, fixed: Mapping[str, Fixed], used: str) -> Architecture:
    """One of Gemma's architectures, with their own defaults."""
    without = ("hidden_act", "mlp_bias", "use_sliding_window")
    settings: dict[str, Any] = {
        **_LLAMA_NAMES,
        "family": family,
        "tied": True,
        "groups_follow": False,
        "head_size": 256,
        "query_scalar": 256,
        "window": 4096,
        "windowed": "pattern",
        "fixed": {
            **{key: one for key, one in _LLAMA_FIXED.items() if key not in without},
            # Files of Gemma 2 have both; only the first is read.
            "hidden_activation": _GELU,
            "hidden_act": _GELU,
            "use_bidirectional_attention": Fixed((False, None), "as tokens here see earlier ones only", None),
            **fixed,
        },
        "used": _LLAMA_NAMES["used"] | _keys(f"query_pre_attn_scalar final_logit_softcapping {used}"),
        # The cache of generation, and an attribute that transformers 5 writes and does not read.
        "unused": _LLAMA_NAMES["unused"] | {"cache_implementation", "_sliding_window_pattern"},
        "weights": GEMMA_WEIGHTS,
    }
    return Architecture(classes=(name,), **settings)


_GEMMA2 = _gemma("gemma2", "Gemma2ForCausalLM", {}, "attn_logit_softcapping")
ARCHITECTURES.add(
    "gemma2",
    replace(
        _GEMMA2,
        attn_softcap=50.0,
        logit_softcap=30.0,
        unused=_GEMMA2.unused | {"sliding_window_size"},  # which the published folders have beside sliding_window
    ),
)
_UNCAPPED = Fixed((None,), "as this architecture bounds no attention scores", None)
ARCHITECTURES.add(
    "gemma3_text",
    replace(
        _gemma(
            "gemma3",
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": _UNCAPPED},
            "rope_local_base_freq sliding_window_pattern",
        ),
        logit_softcap=0.0,
    ),
)
ARCHITECTURES.add(
    "gpt2",
    Architecture(
        classes=("GPT2LMHeadModel",),
        layers="n_layer",
        hidden="n_embd",
        heads="n_head",
        ffn="n_inner",
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        family="gpt2",
        tied=True,
        fixed={
            **_ALL,
            # three names of one function, the tanh form
            "activation_function": Fixed(
                ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "the tanh form of GELU", "gelu_new"
            ),
            "attn_pdrop": _GPT2_DROPOUT,
            "embd_pdrop": _GPT2_DROPOUT,
            "resid_pdrop": _GPT2_DROPOUT,
            "scale_attn_weights": Fixed(
                (True,), "as attention here divides by the root of the head's size", default=True
            ),
            "scale_attn_by_inverse_layer_idx": Fixed(
                (False,), "as attention here is scaled alike in all layers", default=False
            ),
        },
        used=_keys("n_positions"),
        # transformers does not read n_ctx, an old name; summary_* belong to GPT2DoubleHeadsModel.
        unused=_keys(
            "n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels "
            "summary_first_dropout"
        ),
        weights=GPT2_WEIGHTS,
    ),
)

_EXPERTS = "its experts are not those of Mixtral or Qwen3-MoE"
ELSEWHERE = {
    "bert": "it is an encoder",
    "roberta": "it is an encoder",
    "t5": "it has an encoder",
    "gpt_neox": "it has rotary positions with LayerNorm, and attention beside the feed-forward block",
    "gptj": "it has rotary positions with LayerNorm, and attention beside the feed-forward block",
    "gpt_neo": "it has local attention",
    "gpt_bigcode": "it has one key and value head with LayerNorm",
    "falcon": "it has rotary positions or ALiBi with LayerNorm, and attention beside the feed-forward block",
    "opt": "it has ReLU and shifted positions",
    "bloom": "it has ALiBi",
    "mpt": "it has ALiBi",
    "gemma": "it has GELU gates, scaled embeddings and heads of a size of their own",
    "gemma3": "it has images",
    "phi": "it has rotary positions with LayerNorm, and attention beside the feed-forward block",
    "phi3": "it has scaled rotary positions or windows",
    "granite": "it has factors on embeddings, attention, residuals and logits",
    "cohere": "it has LayerNorm without biases, and attention beside the feed-forward block",
    "qwen2_moe": _EXPERTS,
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
}
"""Why some other architectures are not supported."""
