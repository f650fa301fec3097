"""Tiny random models of transformers, in folders as ``save_pretrained`` writes them."""

from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

SEQ_LEN, VOCAB = 8, 260
_COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {
    **_COMMON,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_UPPER = {"max_window_layers": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
_SPARSE = {"moe_intermediate_size": 12, "decoder_sparse_step": 2, "mlp_only_layers": []}
_GEMMA = {**_LLAMA, "head_dim": 8, "sliding_window": 3}
MODELS = {
    "llama": ("LlamaConfig", {**_LLAMA, "rms_norm_eps": 1e-6, "rope_theta": 5e5}),
    "llama tied": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen2": (
        "Qwen2Config",
        {**_LLAMA, "head_dim": 16, "rope_scaling": _LLAMA3, "use_sliding_window": True, "sliding_window": 4, **_UPPER},
    ),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 16, "rope_scaling": _YARN, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_LLAMA, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, **_SPARSE},
    ),
    "olmo2": ("Olmo2Config", {**_LLAMA, "rms_norm_eps": 1e-6, "num_key_value_heads": 4}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 0.8, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GEMMA, "sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gpt2": (
        "GPT2Config",
        {**_COMMON, **_NO_DROPOUT, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_inner": 20, "n_positions": SEQ_LEN},
    ),
}
"""Name -> class of the configuration, and its settings."""


def require_transformers():
    """Transformers, without network; skips the test where it is missing."""
    pytest.importorskip("transformers", reason="needs pipeloom[hf]")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextmanager
def wide():
    """Let transformers compute everything in float64: norms and rotary angles are float32 in any model."""
    with ExitStack() as stack:
        for place, name, value in (
            (torch, "float32", torch.float64),
            (torch, "float", torch.float64),
            (torch.Tensor, "float", torch.Tensor.double),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


def make_model(name: str, dtype: torch.dtype = torch.float32):
    """A random model; its norms and biases are random, too."""
    transformers = require_transformers()
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(list(MODELS).index(name))
    with wide():
        model = transformers.AutoModelForCausalLM.from_config(config)
    if "experts" in "".join(name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # the others do not compute in float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def save(model, folder: Path, **settings: object) -> Path:
    """The folder that transformers writes."""
    model.save_pretrained(folder, **settings)
    return folder
