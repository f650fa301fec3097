"""Wrong inputs of what people bring to a run. Each: a command, what is changed before it, words of its message.

Changes apply to the files of ``own_things``: a new content, ``None`` to remove the file, or a function of the old one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

Change = str | bytes | None | Callable[[bytes], bytes]
Row = tuple[str, dict[str, Change], str]


def keys(**settings: Any) -> Change:
    """A JSON file with other values of these keys; ``...`` removes one."""

    def change(content: bytes) -> bytes:
        table = {**json.loads(content), **settings}
        return json.dumps({key: value for key, value in table.items() if value is not ...}).encode()

    return change


def tensors(function: Callable[[dict[str, Any]], object]) -> Change:
    """A safetensors file whose tensors by name a function has changed."""

    def change(content: bytes) -> bytes:
        found = load(content)
        function(found)
        return save(found, {"format": "pt"})

    return change


def half(content: bytes) -> bytes:
    """The first half."""
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """With another byte at its end."""
    return content[:-1] + bytes([content[-1] ^ 1])


def more(text: str) -> Change:
    """With more at the end of the file."""
    return lambda content: content + text.encode()


def _sources(*tables: str) -> dict[str, Change]:
    lines = [f"[[data.sources]]\n{table}\n" for table in tables]
    return {"run.toml": lambda content: content.replace(b'path = "text.txt"', b"") + "".join(lines).encode()}


_CONFIG, _WEIGHTS, _INDEX = "llama/config.json", "llama/model.safetensors", "llama/model.safetensors.index.json"
_FILE = "train run.toml --model.file llama"
_INIT = "train run.toml --checkpoint.init llama"
_SMALL = "train small.toml"
_OWN = f"{_SMALL} --data.tokenizer tokenizer"
_DAMAGED = "data.path tokens is a folder of tokens, which are damaged; tokenize the text again"
_NO_TOKENIZER = "must be a tokenizer.json of the tokenizers library"
_CHECKPOINT = "run/checkpoints/step-000002"

MODELS: list[Row] = [
    (_FILE, {_CONFIG: None}, "llama/config.json"),
    (_FILE, {_CONFIG: half}, "llama/config.json"),
    (_FILE, {_CONFIG: b"\xff\xfe{"}, "llama/config.json"),
    (_FILE, {_CONFIG: "[" * 100_000}, "llama/config.json"),
    (_FILE, {_CONFIG: keys(model_type="phi99")}, 'model_type must be one of; found "phi99"'),
    (_FILE, {_CONFIG: keys(clip_qkv=8.0)}, "clip_qkv is not a supported key of llama"),
    (_FILE, {_CONFIG: keys(architectures=["LlamaForSequenceClassification"])}, "LlamaForCausalLM"),
    (_FILE, {_CONFIG: keys(attention_dropout=0.1)}, "attention_dropout must be 0"),
    (_FILE, {_CONFIG: keys(partial_rotary_factor=0.5)}, "partial_rotary_factor must be 1"),
    (_FILE, {_CONFIG: keys(quantization_config={"bits": 4})}, "quantization_config must be null"),
    (_FILE, {_CONFIG: keys(auto_map={"AutoModel": "evil.Model"})}, "auto_map must be null"),
    (_FILE, {_CONFIG: keys(head_dim=5)}, "head_dim"),
    (_FILE, {_CONFIG: keys(rope_theta=-1)}, "rope_theta"),
    (_FILE, {_CONFIG: keys(rms_norm_eps="small")}, "rms_norm_eps"),
    (
        _FILE,
        {_CONFIG: keys(rope_scaling={"rope_type": "dynamic", "factor": 2.0})},
        "rope_scaling must be null or of rope_type",
    ),
    (_FILE, {_CONFIG: keys(rope_scaling={"rope_type": "linear"})}, "factor"),
    (_FILE, {_CONFIG: keys(num_hidden_layers=-2, vocab_size=0)}, "num_hidden_layers; vocab_size"),
    ("train run.toml --model.file gpt2 --data.seq-len 16", {}, "n_positions must be 16"),
    ("train run.toml --model.file gpt2", {"gpt2/config.json": keys(resid_pdrop=0.1)}, "resid_pdrop must be 0"),
    ("train run.toml --model.file gpt2", {"gpt2/config.json": keys(activation_function="relu")}, "gelu_new"),
    ("train run.toml --model.file llama --model.preset llama-3-8b", {}, "model.preset and model.file"),
    ("train run.toml --model.file llama --model.hidden-size 32", {}, "model.hidden_size"),
    ("simulate run.toml --model.file llama", {_CONFIG: keys(vocab_size=1.5)}, "vocab_size"),
    (f"train run.toml --model.file {'x' * 300}", {}, "there is no model"),
    ("train run.toml --model.file /dev/zero", {}, "there is no model '/dev/zero'"),
    (_FILE, {_CONFIG: keys(vocab_size=10**12)}, "not enough memory"),
]
WEIGHTS: list[Row] = [
    ("train run.toml --checkpoint.init nowhere", {}, "nowhere"),
    ("train run.toml --checkpoint.init text.txt", {}, "checkpoint.init"),
    ("train run.toml --checkpoint.init tokenizer", {}, "checkpoint.init"),
    (_INIT, {_WEIGHTS: None}, "expected model.safetensors or model.safetensors.index.json in"),
    (_INIT, {_WEIGHTS: None, "llama/pytorch_model.bin": "x"}, "pytorch_model.bin: pickles"),
    (_INIT, {_WEIGHTS: half}, "model.safetensors"),
    (_INIT, {_WEIGHTS: "weights"}, "model.safetensors"),
    (_INIT, {_WEIGHTS: ""}, "model.safetensors"),
    (_INIT, {_INDEX: "{"}, "index.json"),
    (_INIT, {_INDEX: '{"weight_map": {"a": "../other.safetensors"}}'}, "files of its folder"),
    (_INIT, {_INDEX: '{"weight_map": {"a": "model-1.safetensors"}}'}, "model-1.safetensors"),
    (_INIT, {_WEIGHTS: tensors(lambda found: found.pop("model.norm.weight"))}, "model.norm.weight"),
    (_INIT, {_WEIGHTS: tensors(lambda found: found.update(extra=found["model.norm.weight"] * 2))}, "extra"),
    (
        _INIT,
        {_WEIGHTS: tensors(lambda found: found.update({"lm_head.weight": found["lm_head.weight"][:9]}))},
        "lm_head.weight",
    ),
    (_INIT, {_WEIGHTS: tensors(lambda found: found.update({"lm_head.weight": found["lm_head.weight"].char()}))}, "I8"),
    (_INIT, {_CONFIG: keys(num_hidden_layers=3)}, "model.layers.2"),
    ("train run.toml --model.file gpt2 --checkpoint.init llama", {}, "checkpoint.init llama is of another model"),
    (_INIT, {_CONFIG: keys(vocab_size=200)}, "model.vocab_size must be at least 257"),
    (f"{_SMALL} --checkpoint.init run --model.num-layers 3", {}, "is not of this model"),
    (f"{_SMALL} --checkpoint.init run --data.tokenizer tokenizer", {}, "tokenizer"),
    (f"{_SMALL} --checkpoint.init run", {f"{_CHECKPOINT}/.metadata": flipped}, "damaged"),
    (f"train run.toml --checkpoint.init {'x' * 300}", {}, "too long"),
    (_INIT, {_INDEX: '{"weight_map": {"a": ""}}'}, "*.safetensors files of its folder"),
    (_INIT, {_INDEX: '{"weight_map": {"a": ".."}}'}, "*.safetensors files of its folder"),
    (_INIT, {_WEIGHTS: tensors(dict.clear)}, "it lacks"),
    (_INIT, {_WEIGHTS: b"\xff" * 8 + b"{}"}, "header too large"),
    ("convert merge llama new --models nowhere", {}, "nothing at nowhere, and no config.json of a Hugging Face model"),
    (f"convert merge run new --models {'x' * 300}", {}, "too long"),
    ("convert merge run new --models llama", {}, "llama: model.num_heads is 2, there it is 4"),
    ("convert merge llama new --models llama", {_WEIGHTS: None}, "expected model.safetensors or"),
    ("convert merge llama new --models run", {}, "run: model.vocab_size is"),
]
DATA: list[Row] = [
    (f"{_SMALL} --data.path nowhere", {}, "data.path must be a file or a folder"),
    (f"{_SMALL} --data.path text.txt", {"text.txt": ""}, "text.txt"),
    (f"{_SMALL} --data.path text.txt", {"text.txt": b"\0\1" * 4000}, "text.txt"),
    (
        f"{_SMALL} --data.path text.jsonl",
        {"text.jsonl": more('{"text": 7}\n')},
        "line 100 of; must have a text under 'text'",
    ),
    (
        f"{_SMALL} --data.path text.jsonl",
        {"text.jsonl": more('{"text": \n')},
        "line 100 of; must be a JSON object",
    ),
    (f"{_SMALL} --data.path text.jsonl --data.field body", {}, "must have a text under 'body'; data.field"),
    (f"{_SMALL} --data.path text.jsonl.gz", {"text.jsonl.gz": half}, "is damaged behind line"),
    (f"{_SMALL} --data.path text.jsonl.zst", {"text.jsonl.zst": "no"}, "text.jsonl.zst"),
    (f"{_SMALL} --data.path text.parquet", {"text.parquet": "PAR1"}, "must be a Parquet file"),
    (f"{_SMALL} --data.path text.arrow", {"text.arrow": "ARROW1"}, "must be a stream of Arrow batches"),
    (
        f"{_SMALL} --data.path set",
        {"set/state.json": '{"_data_files": [{"filename": "../x.arrow"}]}'},
        "must list Arrow files",
    ),
    (f"{_SMALL} --data.path set", {"set/.hidden": "text"}, "set"),
    (f"{_SMALL} --data.path indexed.bin", {"indexed.idx": half}, "indexed.idx"),
    (f"{_SMALL} --data.path indexed.idx", {"indexed.bin": half}, "does not fit indexed.bin"),
    (f"{_SMALL} --data.path indexed.bin", {"indexed.idx": "hello"}, "must be an index of Megatron-LM"),
    (f"{_SMALL} --data.path indexed.bin --data.tokenizer tokenizer", {}, "token"),
    (f"{_SMALL} --data.path indexed.bin --data.tokenizer bpe", {}, "data.tokenizer bpe is trained on text"),
    (f"{_SMALL} --data.path indexed.bin --data.field body", {}, "data.field has no effect"),
    (f"{_SMALL} --data.path tokens --data.tokenizer tokenizer", {}, "has tokens of another tokenizer"),
    (f"{_SMALL} --data.path tokens --data.tokenizer bpe", {}, "data.tokenizer bpe is trained on text"),
    (
        f"{_SMALL} --data.path tokens --data.validation-fraction 0.2",
        {},
        "data.validation_fraction has no effect",
    ),
    (f"{_SMALL} --data.path tokens", {"tokens/tokens.bin": half}, _DAMAGED),
    (f"{_SMALL} --data.path chat.jsonl", {}, "messages need a tokenizer with a chat template"),
    (f"{_SMALL} --data.pack best", {}, "data.pack"),
    (f"{_SMALL} --data.attention documents", {}, "data.attention"),
    (f"{_SMALL} --data.attention document --layout.token-slices auto", {}, "layout.token_slices auto"),
    (f"{_SMALL} --data.seq-len 4000", {}, "data.seq_len"),
    (
        f"{_SMALL} --data.path chat.jsonl --data.tokenizer tokenizer",
        {"chat.jsonl": '{"messages": []}\n', "tokenizer/chat_template.jinja": "x"},
        "a conversation must have an answer",
    ),
    (f"{_SMALL} --data.path text.jsonl", {"text.jsonl": "[" * 100_000 + "\n"}, "line 1 of; must be a JSON object"),
    (f"{_SMALL} --data.path text.jsonl", {"text.jsonl": '{"prompt": "a"}\n'}, "found the keys prompt"),
    (f"{_SMALL} --data.path text.jsonl.gz", {"text.jsonl.gz": "plain"}, "is damaged behind line 0"),
    (f"{_SMALL} --data.path indexed", {}, "data.path must be a file or a folder"),
    (f"{_SMALL} --data.path tokens", {"tokens/tokens.bin": None}, _DAMAGED),
    (f"{_SMALL} --data.path tokens", {"tokens/counts.npy": None}, _DAMAGED),
    (f"{_SMALL} --data.path tokens", {"tokens/counts.npy": lambda content: content[:-1]}, "counts.npy is damaged"),
    (f"{_SMALL} --data.path tokens", {"tokens/summary.json": half}, _DAMAGED),
    (f"{_SMALL} --data.path tokens", {"tokens/summary.json": keys(vocab_size="many")}, _DAMAGED),
    (f"{_SMALL} --data.path tokens", {"tokens/summary.json": keys(train_tokens=-5)}, _DAMAGED),
    (f"{_SMALL} --data.path tokens", {"tokens/summary.json": keys(file="/etc/passwd")}, "elsewhere, in /etc/passwd"),
    (
        f"{_SMALL} --data.path tokens",
        {"tokens/tokens.bin": lambda content: b"\xff" * len(content), "tokens/tokens.bin.crc32.npy": None},
        "the text has the token 65535, the model's vocabulary 0..256; tokenize the text again",
    ),
    (f"{_SMALL} --data.path tokens", {"tokens/tokens.idx": None}, "tokens.idx"),
    (f"{_SMALL} --data.cache text.txt", {}, "cache folder must be writable"),
]
MIXTURES: list[Row] = [
    ("train run.toml", _sources('path = "text.txt"\nweight = 0'), "the weight of each of data.sources must be above 0"),
    ("train run.toml", _sources('path = "text.txt"\nweight = inf'), "must be above 0 and finite"),
    ("train run.toml", _sources('path = "text.txt"', 'path = "text.txt"'), "found; text.txt twice; add the weights"),
    ("train run.toml", _sources('path = "nowhere"'), "the path of each of data.sources must be a file or a folder"),
    ("train run.toml", _sources("weight = 2"), "path"),
    ("train run.toml", _sources('path = "text.txt"\nwt = 2'), "wt"),
    ("train run.toml", _sources('path = "text.txt"\nweight = "much"'), "weight"),
    ("train run.toml --data.field body", _sources('path = "text.jsonl"'), "data.field and data.sources"),
    (
        "train run.toml",
        {"run.toml": lambda content: content.replace(b'path = "text.txt"', b"sources = []")},
        "at least one source",
    ),
    (
        "train run.toml",
        {"run.toml": lambda content: content.replace(b'path = "text.txt"', b'sources = "text.txt"')},
        "data.sources",
    ),
    (
        "train run.toml",
        {"run.toml": more('[[data.sources]]\npath = "text.jsonl"\n')},
        "data.path and data.sources",
    ),
]
TOKENIZERS: list[Row] = [
    (
        f"{_SMALL} --data.tokenizer nowhere",
        {},
        "data.tokenizer must be bytes, bpe, a tokenizer.json or a folder",
    ),
    (f"{_SMALL} --data.tokenizer llama", {}, "must contain a tokenizer.json"),
    (
        _OWN,
        {"tokenizer/tokenizer.json": "{}"},
        _NO_TOKENIZER,
    ),
    (
        _OWN,
        {"tokenizer/tokenizer.json": half},
        _NO_TOKENIZER,
    ),
    (
        _OWN,
        {"tokenizer/tokenizer.json": keys(model={"type": "Magic", "vocab": {"</s>": 0}})},
        "data.tokenizer tokenizer: expected a tokenizer",
    ),
    (
        f"{_SMALL} --data.tokenizer tokenizer/tokenizer.json",
        {"tokenizer/tokenizer_config.json": '{"eos_token": "<end>"}'},
        "eos_token '<end>', which is none of its tokens",
    ),
    (
        _OWN,
        {"tokenizer/tokenizer_config.json": "{"},
        "tokenizer_config.json",
    ),
    (
        _OWN,
        {"tokenizer/special_tokens_map.json": "[]"},
        "special_tokens_map.json must be a JSON object",
    ),
    (
        f"{_SMALL} --data.tokenizer tokenizer --data.bpe-vocab-size 300",
        {},
        "data.bpe_vocab_size has no effect without data.tokenizer bpe",
    ),
    (f"{_SMALL} --data.tokenizer tokenizer --model.vocab-size 2", {}, "model.vocab_size must be at least 3"),
    (
        f"{_SMALL} --data.tokenizer tokenizer --data.path chat.jsonl",
        {"tokenizer/chat_template.jinja": "{{ '%' * 10**9 }}"},
        "chat template",
    ),
    (
        f"{_SMALL} --data.tokenizer tokenizer --data.path chat.jsonl",
        {"tokenizer/chat_template.jinja": "{% for"},
        "chat template",
    ),
    (
        _OWN,
        {"tokenizer/tokenizer_config.json": '{"add_bos_token": true, "bos_token": "<b>"}'},
        "bos_token '<b>', which is none of its tokens",
    ),
    (_OWN, {"tokenizer/tokenizer_config.json": '{"add_bos_token": true}'}, "found no bos_token"),
    (_OWN, {"tokenizer/tokenizer.json": keys(added_tokens=3)}, _NO_TOKENIZER),
    (_OWN, {"tokenizer/tokenizer.json": keys(model={"vocab": {}})}, _NO_TOKENIZER),
]
TOKENIZE: list[Row] = [
    ("tokenize nowhere new", {}, "data.path must be a file or a folder"),
    ("tokenize text.txt tokens", {}, "tokens already exists"),
    ("tokenize tokens new", {}, "has tokens already"),
    ("tokenize indexed.bin new", {}, "has tokens already"),
    ("tokenize text.txt new --workers 0", {}, "--workers must be at least 1"),
    ("tokenize text.txt new --tokenizer bpe --bpe-vocab-size 10", {}, "257"),
    ("tokenize text.txt new --bpe-vocab-size 300", {}, "bpe_vocab_size has no effect without"),
    ("tokenize text.txt new --tokenizer llama", {}, "must contain a tokenizer.json"),
    ("tokenize text.txt new --field body", {}, "field has no effect"),
    ("tokenize text.jsonl new --field body", {}, "must have a text under 'body'"),
    ("tokenize text.txt text.txt/new", {}, "text.txt"),
    ("tokenize text.txt new --validation-fraction 0", {}, "validation-fraction must be"),
    ("tokenize chat.jsonl new --quiet", {}, "messages need a tokenizer with a chat template"),
    ("tokenize tokens new", {"tokens/summary.json": half}, "has tokens already"),
]
CHECKPOINTS: list[Row] = [
    (f"{_SMALL} --checkpoint.resume nowhere", {}, "checkpoint.resume"),
    (f"{_SMALL} --checkpoint.resume run/config.toml", {}, "found a file at"),
    (f"{_SMALL} --checkpoint.resume llama", {}, "checkpoint.resume"),
    (f"{_SMALL} --checkpoint.resume run --training.steps 1", {}, "training.steps must be at least 2"),
    (
        f"{_SMALL} --checkpoint.resume run",
        {f"{_CHECKPOINT}/__0_0.distcp": flipped},
        "damaged; SHA-256 differs",
    ),
    (f"{_SMALL} --checkpoint.resume run", {f"{_CHECKPOINT}/__0_0.distcp": None}, "is missing"),
    (
        f"{_SMALL} --checkpoint.resume {_CHECKPOINT}",
        {f"{_CHECKPOINT}/checkpoint.json": None},
        "checkpoint.json is missing",
    ),
    (
        f"{_SMALL} --checkpoint.resume run/checkpoints/step-000002",
        {f"{_CHECKPOINT}/checkpoint.json": keys(step=1)},
        "changed after it was written",
    ),
    (f"{_SMALL} --checkpoint.resume run --model.hidden-size 32", {}, "is not of this model; 32"),
    (f"{_SMALL} --checkpoint.resume run --optimizer.name sgd", {}, "is of another optimizer"),
    (
        f"{_SMALL} --checkpoint.resume run --training.freeze-layers 1",
        {},
        "training.freeze_layers or adapter.rank differs",
    ),
    (f"{_SMALL} --checkpoint.resume run --data.tokenizer tokenizer", {}, "tokenizer"),
    (f"{_SMALL} --output.folder run", {}, "contains a run already"),
    (f"{_SMALL} --checkpoint.keep-every 2", {}, "checkpoint.keep_every has no effect without checkpoint.keep"),
    (
        f"{_SMALL} --checkpoint.every-s 0 --checkpoint.keep 3 --checkpoint.keep-every 2 --checkpoint.no-background",
        {},
        "checkpoint.keep, checkpoint.keep_every, checkpoint.background have no effect without checkpoint.every or",
    ),
    (
        f"{_SMALL} --checkpoint.every-s 0 --training.on-spike rollback",
        {},
        "checkpoint.every and checkpoint.every_s plan none; set one of them, or use skip",
    ),
    (
        f"{_SMALL} --restart.times 1 --restart.layout plan",
        {},
        "restart.layout has no effect without a layout of at least 2 ranks",
    ),
    (f"{_SMALL} --checkpoint.time-limit-s 0", {}, "checkpoint.time_limit_s must be above 0"),
    (f"{_SMALL} --training.seed {2**63}", {}, "training.seed must be at most 9,223,372,036,854,775,807"),
    (f"{_SMALL} --training.seed {-(2**63) - 1}", {}, "training.seed must be at least -9,223,372,036,854,775,808"),
    (f"{_SMALL} --checkpoint.grace-s -1", {}, "checkpoint.grace_s must be at least 0"),
    (f"{_SMALL} --checkpoint.grace-s nan", {}, "checkpoint.grace_s"),
    (f"{_SMALL} --checkpoint.background maybe", {}, "checkpoint.background"),
    (f"{_SMALL} --checkpoint.every-s -1", {}, "checkpoint.every_s"),
]
EVALUATE: list[Row] = [
    ("evaluate nowhere", {}, "RUN must be the folder of a run"),
    ("evaluate llama", {}, "data.path must be set, since a model of Hugging Face folders has no text"),
    ("evaluate run", {f"{_CHECKPOINT}/checkpoint.json": None}, "no complete checkpoint"),
    ("evaluate run", {f"{_CHECKPOINT}/__0_0.distcp": flipped}, "damaged"),
    ("evaluate run --data.path nowhere", {}, "data.path must be a file or a folder"),
    ("evaluate run --data.tokenizer tokenizer", {}, "tokenizer"),
    ("evaluate run --data.seq-len 9000", {}, "data.seq_len"),
    ("evaluate run --model.num-layers 3", {}, "--model.num-layers has no effect on evaluate"),
    ("evaluate run --layout.pp 9", {}, "stages"),
    ("evaluate run --layout.tp 3", {}, "layout.tp must divide model.num_heads"),
    ("evaluate run --batches -1", {}, "--batches must be at least 1"),
    ("evaluate run --data.path text.jsonl --data.field body", {}, "must have a text under 'body'"),
    (f"{_SMALL} --training.validate-every 0", {}, "training.validate_every must be at least 1"),
    (
        f"{_SMALL} --training.validate-every 1 --training.validation-batches 0",
        {},
        "training.validate_every has no effect without training.validation_batches",
    ),
    ("evaluate run", {"run/config.toml": "x"}, "run/config.toml"),
    (
        "evaluate run",
        {"run/config.toml": lambda content: content.replace(b"num_layers = 2", b"num_layers = 3")},
        "layout.partition",
    ),
    ("evaluate run --training.device cuda", {}, "found 0"),
]
EXPORT: list[Row] = [
    ("export nowhere new --format hf", {}, "nowhere"),
    ("export llama new --format hf", {}, "llama"),
    ("export run new --format onnx", {}, "onnx"),
    ("export run llama --format hf", {}, "already has weights"),
    ("export run tokenizer --format hf", {}, "is another tokenizer"),
    ("export run text.txt --format hf", {}, "text.txt"),
    ("export run new --format hf", {f"{_CHECKPOINT}/__0_0.distcp": half}, "damaged"),
    ("export run new --format hf --file-gb -1", {}, "--file-gb must be above 0"),
]
AROUND: list[Row] = [
    (f"{_SMALL} --output.log csv", {}, "output.log"),
    (f"{_SMALL} --output.log wandb", {}, "output.log wandb needs a package that is missing: pip install wandb"),
    (f"{_SMALL} --output.log mlflow", {}, "output.log mlflow needs a package that is missing"),
    (f"{_SMALL} --output.profile 3", {}, "output.profile must be steps from 1 to training.steps 2, found [3]"),
    (f"{_SMALL} --output.trace-step 3", {}, "output.trace_step must be at most training.steps 2, found 3"),
    (f"{_SMALL} --output.profile 0", {}, "output.profile must be steps from 1"),
    (f"{_SMALL} --output.profile first", {}, "output.profile"),
    (f"{_SMALL} --training.freeze-layers 3", {}, "training.freeze_layers must be at most model.num_layers 2"),
    (f"{_SMALL} --training.freeze-layers -1", {}, "training.freeze_layers must be at least 0"),
    (f"{_SMALL} --training.freeze-layers 1 --model.tied", {}, "training.freeze_layers freezes the embedding"),
    (f"{_SMALL} --training.freeze-layers 1 --schedule.family zb-h1 --layout.pp 2", {}, "which splits backwards"),
    (
        f"{_SMALL} --training.freeze-layers 1 --schedule.device-budget 1MB --layout.loops 2",
        {},
        "training.freeze_layers does not work with schedule.device_budget",
    ),
    (
        f"{_SMALL} --training.freeze-layers 1 --schedule.offload --schedule.activation-budget 1MB",
        {},
        "training.freeze_layers does not work with schedule.offload",
    ),
    ("launch small.toml --out new --to k8s", {}, "k8s"),
    ("launch small.toml --out new --time-limit tomorrow", {}, "the time limit must be like"),
    ("launch small.toml --out new --machine.cluster nowhere", {}, "nowhere"),
    ("launch small.toml --out text.txt", {}, "text.txt"),
    ("launch small.toml --out new", {"new/torchrun.sh": "mine"}, "has files that pipeloom did not write"),
    ("launch run.toml --out new --model.file llama", {_CONFIG: keys(clip_qkv=8.0)}, "clip_qkv"),
    ("launch small.toml --out new --to megatron --training.freeze-layers 1", {}, "training.freeze_layers"),
]
_NEOX = "train run.toml --model.file neox"
ADAPTED: list[Row] = [
    (f"{_NEOX} --layout.tp 2", {}, "layout.tp 2 does not work with a model that classes of transformers compute"),
    (f"{_NEOX} --layout.token-slices 2", {}, "layout.token_slices 2 does not work"),
    (f"{_NEOX} --layout.recompute selective", {}, "layout.recompute selective does not work"),
    (f"{_NEOX} --schedule.family zb-h1", {}, "schedule.family zb-h1 does not work"),
    (f"{_NEOX} --schedule.offload --schedule.activation-budget 1MB", {}, "schedule.offload does not work"),
    (f"{_NEOX} --schedule.device-budget 1MB --layout.loops 2", {}, "schedule.device_budget does not work"),
    (f"{_NEOX} --training.compile --training.compile-backend aot_eager", {}, "training.compile does not work"),
    (f"{_NEOX} --training.freeze-layers 1", {}, "training.freeze_layers 1 does not work"),
    (f"{_NEOX} --model.rope-theta 5", {}, "model.rope_theta has no effect"),
    (f"{_NEOX} --data.seq-len 65", {}, "max_position_embeddings must be at least 65"),
    (_NEOX, {"neox/config.json": keys(auto_map={"AutoModel": "x.Y"})}, "code of a folder is never executed"),
    (_NEOX, {"neox/config.json": keys(quantization_config={})}, "quantized weights are not trained"),
    (_NEOX, {"neox/config.json": keys(hidden_dropout=0.1)}, "hidden_dropout must be 0"),
    (_NEOX, {"neox/config.json": keys(hidden_size="x")}, "transformers cannot read it"),
    (f"{_NEOX} --checkpoint.init neox", {}, "found neither"),
    ("train run.toml --model.adapted x", {}, "model.adapted is set by model.file"),
    ("simulate run.toml --model.file neox", {}, "predictions have no formulas"),
]

_PAIRS = f"{_SMALL} --adapter.rank 4"
ADAPTERS: list[Row] = [
    (f"{_SMALL} --adapter.targets q", {}, "adapter.targets has no effect without adapter.rank"),
    (f"{_SMALL} --adapter.alpha 16", {}, "adapter.alpha has no effect without adapter.rank"),
    (f"{_SMALL} --adapter.init random", {}, "adapter.init has no effect without adapter.rank"),
    (f"{_SMALL} --adapter.rank 0", {}, "adapter.rank must be at least 1"),
    (f"{_SMALL} --adapter.rank 65", {}, "adapter.rank must be at most model.hidden_size"),
    (f"{_PAIRS} --adapter.alpha -1", {}, "adapter.alpha must be above 0"),
    (f"{_PAIRS} --adapter.targets q_proj", {}, "adapter.targets"),
    (f"{_PAIRS} --adapter.targets q v q", {}, "adapter.targets must name each matrix once, found q twice"),
    (f"{_PAIRS} --adapter.targets gate --model.family gpt2", {}, "gpt2 has (q k v o up down), found gate"),
    (f"{_PAIRS} --adapter.dropout 0.1", {}, "adapter.dropout"),
    (f"{_PAIRS} --training.freeze-layers 2", {}, "training.freeze_layers 2 leaves no layer for adapter.rank"),
    (f"{_PAIRS} --schedule.family zb-h1 --layout.pp 2", {}, "adapter.rank does not work with schedule.family zb-h1"),
    (
        f"{_PAIRS} --schedule.device-budget 1MB --layout.loops 2",
        {},
        "adapter.rank does not work with schedule.device_budget",
    ),
    (f"{_PAIRS} --checkpoint.resume run", {}, "training.freeze_layers or adapter.rank differs"),
    (f"{_NEOX} --adapter.rank 4", {}, "adapter.rank 4 does not work with a model that classes of transformers compute"),
    ("launch small.toml --out new --to megatron --adapter.rank 4", {}, "adapter.rank 4: the export is of runs that"),
    ("simulate small.toml --adapter.alpha 3", {}, "--adapter.alpha"),
    ("export run new --merge", {}, "has no adapters to merge"),
    ("plan small.toml --devices 4", {"small.toml": more("[adapter]\nrank = 100000\n")}, "adapter.rank must be at most"),
    (
        "plan small.toml --devices 4 --families zb-h1",
        {"small.toml": more("[adapter]\nrank = 2\n")},
        "pipeloom with adapters has no family 'zb-h1'",
    ),
]
OPTIMIZERS: list[Row] = [
    (f"{_SMALL} --optimizer.name moun", {}, "optimizer.name; muon"),
    (
        f"{_SMALL} --optimizer.name muon --layout.tp 2",
        {},
        "optimizer.name muon updates whole matrices; set layout.tp 1",
    ),
    (f"{_SMALL} --optimizer.name adafactor --optimizer.betas 0.9 0.99", {}, "optimizer.betas has no effect"),
    (f"{_SMALL} --optimizer.name adafactor --optimizer.settings depth=1", {}, "optimizer.settings depth=1 has no"),
    (
        f"{_SMALL} --optimizer.weight-decay 0 --optimizer.settings weight_decay=-1 betas=3",
        {},
        "settings weight_decay=-1 has a key of its own; use optimizer.weight_decay; use optimizer.betas",
    ),
    (
        f"{_SMALL} --optimizer.name adafactor --optimizer.settings clip=1 clip=2",
        {},
        "settings clip=1 and optimizer.settings clip=2 set the same; leave all but one of them out",
    ),
    (f"{_SMALL} --optimizer.settings eps=1e999", {}, "with finite numbers, found 'eps=1e999'"),
    (f"{_SMALL} --optimizer.lr-decay-style exponential", {}, "optimizer.lr-decay-style"),
    (
        f"{_SMALL} --optimizer.lr-decay-style constant --optimizer.lr-min-fraction 0.2",
        {},
        "optimizer.lr_min_fraction has no effect",
    ),
    (f"{_SMALL} --optimizer.lr-wsd-decay-steps 2", {}, "optimizer.lr_wsd_decay_steps has no effect"),
    (
        f"{_SMALL} --optimizer.lr-decay-style wsd --optimizer.lr-wsd-decay-steps 9",
        {},
        "optimizer.lr_wsd_decay_steps and lr_warmup_steps must be at most training.steps 2 together",
    ),
    (f"{_SMALL} --training.z-loss -1", {}, "training.z_loss must be at least 0"),
    ("simulate small.toml --training.z-loss 1e-4", {}, "--training.z-loss"),
    ("launch small.toml --out new --to megatron --training.z-loss 0.1", {}, "training.z_loss 0.1"),
    ("launch small.toml --out new --to torchtitan --optimizer.lr-decay-style wsd", {}, "optimizer.lr_decay_style wsd"),
]
SPIKES: list[Row] = [
    (f"{_SMALL} --training.on-spike ignore", {}, "training.on-spike"),
    (f"{_SMALL} --training.spike-loss 1", {}, "training.spike_loss must be above 1"),
    (f"{_SMALL} --training.spike-grad-norm -2", {}, "training.spike_grad_norm must be above 1"),
    (f"{_SMALL} --training.on-spike rollback --restart.times 1", {}, "training.on_spike rollback does not work with"),
    (
        f"{_SMALL} --training.on-spike skip --schedule.device-budget 1MB --layout.loops 2",
        {},
        "schedule.device_budget does not work with training.on_spike skip",
    ),
    ("simulate small.toml --training.on-spike skip", {}, "--training.on-spike"),
    ("verify small.toml --training.spike-loss 2", {}, "--training.spike-loss"),
]
CHECKS: list[Row] = [
    (f"{_SMALL} --training.check-every 0", {}, "training.check_every must be at least 1"),
    (f"{_SMALL} --training.check-every 1.5", {}, "training.check-every"),
    (f"{_SMALL} --training.check-every 5 --layout.pp 1 --layout.loops 1", {}, "training.check_every has no effect"),
    (f"{_SMALL} --training.check-every 5 --layout.pp 1 --layout.loops 1 --layout.tp 2", {}, "layout.pp x layout.dp of"),
    (
        f"{_SMALL} --training.check-every 5 --schedule.device-budget 1MB --layout.pp 1 --layout.loops 2",
        {},
        "training.check_every has no effect without layout.pp x layout.dp of at least 2",
    ),
    ("simulate small.toml --training.check-every 5", {}, "--training.check-every"),
    (f"{_SMALL} --training.divide-every 5", {}, "training.divide_every has no effect without layout.microbatches"),
    (f"{_SMALL} --layout.microbatches auto", {}, "layout.microbatches has no effect without layout.dp of at least 2"),
    (
        f"{_SMALL} --layout.dp 2 --layout.microbatches auto --training.no-predict",
        {},
        "layout.microbatches auto divides by what training.predict measures before the first step",
    ),
    ("simulate small.toml --training.divide-every 5", {}, "--training.divide-every"),
    ("verify small.toml --training.check-every 5", {}, "--training.check-every"),
]
GROUPS = (
    MODELS,
    ADAPTED,
    ADAPTERS,
    OPTIMIZERS,
    SPIKES,
    CHECKS,
    WEIGHTS,
    DATA,
    MIXTURES,
    TOKENIZERS,
    TOKENIZE,
    CHECKPOINTS,
    EVALUATE,
    EXPORT,
    AROUND,
)


def change_files(folder: Path, changes: dict[str, Change]) -> None:
    """Make the changes of a row."""
    for name, change in changes.items():
        file = folder / name
        if change is None:
            file.unlink()
            continue
        file.parent.mkdir(exist_ok=True)
        content = change(file.read_bytes()) if callable(change) else change
        file.write_bytes(content.encode() if isinstance(content, str) else content)
