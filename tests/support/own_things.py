"""What people bring to a run: a Hugging Face folder, texts, tokens, a tokenizer, a run. All are correct."""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from pipeloom.cli import main
from pipeloom.data.indexed import write_index

SEQ_LEN, VOCAB, HIDDEN, FFN, LAYERS = 8, 260, 16, 20, 2
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": SEQ_LEN,
    "vocab_size": VOCAB,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
NEOX = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
RUN = f"""
[data]
path = "text.txt"
seq_len = {SEQ_LEN}
tokenizer = "bytes"
[layout]
pp = 1
loops = 1
num_microbatches = 1
microbatch_size = 2
[optimizer]
lr = 0.01
lr_warmup_steps = 0
[training]
steps = 2
validation_batches = 1
sample_tokens = 0
predict = false
[output]
folder = "out"
"""
SMALL = '\n[model]\nnum_layers = 2\nhidden_size = 16\nnum_heads = 2\n[checkpoint]\nfinal = "checkpoint"\n'


def write_own_things(folder: Path) -> None:
    """Write all of them; the run is trained."""
    (folder / "run.toml").write_text(RUN)
    (folder / "small.toml").write_text(RUN + SMALL)
    (folder / "text.txt").write_text("".join(f"line {n}: {n % 7} brown foxes\n" for n in range(400)))
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"story {n}, quite short"}) + "\n" for n in range(99))
    )
    (folder / "text.jsonl.gz").write_bytes(gzip.compress((folder / "text.jsonl").read_bytes()))
    printed = [{"role": "user", "content": "which one?"}, {"role": "assistant", "content": "that one"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": printed}) + "\n") * 99)
    (folder / "prompts.jsonl").write_text((json.dumps({"prompt": "which", "completion": "one"}) + "\n") * 99)
    _write_tokens(folder)
    _write_models(folder)
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}, "added_tokens": []}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for words in ("train small.toml --output.folder run", "tokenize text.txt tokens --workers 1 --quiet"):
        assert main(words.split()) == 0


def _write_tokens(folder: Path) -> None:
    tokens = np.arange(4000, dtype="<u2") % 256
    (folder / "indexed.bin").write_bytes(tokens.tobytes())
    write_index(folder / "indexed.idx", np.full(40, 100), 2)


def _write_models(folder: Path) -> None:
    torch.manual_seed(0)
    for name, table in {"llama": LLAMA, "gpt2": GPT2, "neox": NEOX}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(table))
    save_file(_weights(), folder / "llama/model.safetensors", metadata={"format": "pt"})


def _weights() -> dict[str, torch.Tensor]:
    square, groups = (HIDDEN, HIDDEN), (HIDDEN // 2, HIDDEN)
    shapes = {"self_attn.q_proj": square, "self_attn.k_proj": groups, "self_attn.v_proj": groups}
    shapes |= {"self_attn.o_proj": square, "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    every = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in shapes.items()}
    every |= {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in every.items()}
