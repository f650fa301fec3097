"""Wrong inputs, as a person would type them: files, and commands with words that their messages must contain."""

from pathlib import Path

LLAMA = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, '
    '"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, '
    '"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false'
)
HEADER = (
    "set,status,step_time_s,memory_bytes,model,layers,hidden,heads,kv_heads,ffn,mlp,vocab,tied,seq,device,devices,"
    "devices_per_node,dp,tp,pp,loops,shard,micro_batch,global_batch,recompute,schedule,sequence_parallel,attention,"
    "fused_norm,precision,note\n"
)

FILES = {
    "empty.toml": "",
    "broken.toml": "[model\nnum_layers = 3\n",
    "latin.toml": "# caf\xe9",
    "unknown_section.toml": "[modle]\nnum_layers = 3\n",
    "unknown_key.toml": "[layout]\nppp = 4\n",
    "wrong_type.toml": '[layout]\npp = "four"\nloops = 1.5\n',
    "section_as_value.toml": "layout = 4\n",
    "several.toml": "[layout]\npp = 0\nloops = -1\n[training]\nsteps = 0\n[data]\nseq_len = 0\n",
    "escape.toml": '[schedule]\nfamily = "\\u001b[31mred\\u001b[0m"\n',
    "old_precision.toml": '[machine]\nprecision = "fp9"\n',
    "fast.toml": '[machine]\ncluster = "fast_cluster.toml"\n',
    "restart_key.toml": "[restart]\ntime = 2\n",
    "restart_types.toml": '[restart]\ntimes = "two"\nkeep_every = 1.5\n',
    "bad.json": "{",
    "list.json": "[1, 2]",
    "neox.json": '{"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, '
    '"num_attention_heads": 64, "vocab_size": 50432, "rotary_pct": 0.25}',
    "gemma.json": '{"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, '
    '"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}',
    "bert.json": '{"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, '
    '"num_attention_heads": 12, "vocab_size": 30522}',
    "qwen3.json": LLAMA.replace('"llama"', '"qwen3"') + "}",
    "no_type.json": LLAMA.replace('"model_type": "llama", ', "") + "}",
    "yarn.json": LLAMA + ', "rope_scaling": {"type": "yarn", "factor": 4.0}}',
    "biases.json": LLAMA + ', "attention_bias": true}',
    "window.json": LLAMA + ', "sliding_window": 16}',
    "gelu.json": LLAMA.replace('"silu"', '"gelu"') + "}",
    "heads.json": LLAMA.replace('"num_attention_heads": 4', '"num_attention_heads": 7') + "}",
    "kv_heads.json": LLAMA.replace('"num_key_value_heads": 2', '"num_key_value_heads": 3') + "}",
    "experts.json": LLAMA + ', "num_local_experts": 8}',
    "no_layers.json": LLAMA.replace('"num_hidden_layers": 4, ', "") + "}",
    "text_layers.json": LLAMA.replace('"num_hidden_layers": 4', '"num_hidden_layers": "four"') + "}",
    "model.toml": 'name = "m"\nlayers = 0\nhidden = 64\nheads = 4\nffn = 9\nfamily = "llama"\nvocab = 300\ntied = 1\n',
    "misspelled_model.toml": 'name = "m"\nlayer = 2\nhidden = 64\nheads = 4\nffn = 9\nfamily = "llama"\nvocab = 300\n',
    "not_a_schedule.txt": "hello world\n",
    "huge_microbatch.txt": "0F0 0B0 0F2147483647\n",
    "huge_stage.txt": "0F0 99999999F0\n",
    "deadlock.txt": "0B0 0F0\n",
    "twice.txt": "0F0 0F0 0B0\n",
    "no_backward.txt": "0F0 0F1 0B0\n",
    "empty.txt": "",
    "negative.txt": "0F-1\n",
    "bad.csv": "0F0,1F0\nxx\n",
    "no_columns.csv": "a,b\n1,2\n",
    "header_only.csv": HEADER,
    "bad_row.csv": HEADER + "s,ok,abc" + "," * 28 + "\n",
    "tiny.txt": "hi\n",
    "no_text.jsonl": '{"text": "a"}\n{"title": "b"}\n',
    "no_json.jsonl": "hello world\n",
    "cut.jsonl.gz": "hello world\n",
}
"""Text of each file by name; it is written where a command names it."""

WRONG = """
                                                                | usage
trian                                                           | 'train'
Train                                                           | 'train'
simulat                                                         | 'simulate'
plann --model llama-3-8b                                        | 'plan'
shedule 1f1b                                                    | 'schedule'
xyzzy                                                           | xyzzy
--verson                                                        | --verson
train missing.toml                                              | missing.toml
train broken.toml                                               | broken.toml; line 1
train latin.toml                                                | latin.toml
train unknown_section.toml                                      | modle; 'model'
train unknown_key.toml                                          | layout.ppp; 'layout.pp'
train wrong_type.toml                                           | layout.pp; 'four'; layout.loops; 1.5
train section_as_value.toml                                     | layout; section
train several.toml                                              | layout.pp; layout.loops; training.steps; data.seq_len
train escape.toml                                               | there is no schedule
train old_precision.toml                                        | precision
train .                                                         | expected a run file, found a folder
evaluate .                                                      | RUN must be the folder of a run
evaluate missing --batches 0 --layout.pp 0                      | RUN must be the folder of a run; --batches must be
train --layout.pp 0                                             | layout.pp; 1; 0
train --layout.pp -3                                            | layout.pp; -3
train --layout.pp four                                          | layout.pp; four
train --layout.ppp 4                                            | --layout.pp
train --layuot.pp 4                                             | --layout.pp
train --layout.pp                                               | layout.pp
train --layout.pp 3 --layout.loops 0 --training.steps 0         | layout.loops; training.steps
train --layout.pp 64                                            | layers
train --layout.dp 0                                             | layout.dp
train --layout.tp 5                                             | layout.tp
train --layout.tp 4 --model.num-heads 6                         | num_heads; layout.tp
train --layout.num-microbatches 0                               | layout.num_microbatches
train --layout.num-microbatches 100000000                       | memory
train --layout.microbatch-size 0                                | layout.microbatch_size
train --layout.microbatch-size 100000000                        | memory
train --layout.shard everything                                 | everything
train --layout.partition 1 2 3                                  | partition
train --layout.token-slices 1000                                | token_slices
train --layout.sequence-parallel                                | sequence_parallel
train --layout.recompute maybe                                  | maybe
train --schedule.family breadth                                 | breadth-first
train --schedule.family 1f1b --layout.loops 2                   | 1f1b; loops
train --schedule.family 1f1b --schedule.group-size 3            | group size
train --schedule.placement diagonal                             | diagonal
train --schedule.residency 0 --layout.shard full --layout.dp 2  | residency
train --schedule.activation-budget 12parsecs                    | activation_budget
train --schedule.activation-budget 1GB                          | activation_budget
train --schedule.device-budget 1KB                              | device_budget
train --schedule.balance true                                   | --schedule.balance; --schedule.no-balance
train --model.num-layers 0                                      | num_layers
train --model.num-layers 10000000                               | num_layers; 100,000
train --model.hidden-size 193                                   | hidden_size; num_heads
train --model.hidden-size 6000000                               | memory
train --model.num-heads 7                                       | num_heads
train --model.num-kv-heads 4                                    | num_kv_heads
train --model.family bert                                       | bert
train --model.preset llama-3-9b                                 | llama-3-8b
train --model.preset llama-3-70b                                | recipe; data.path
train --model.vocab-size 10                                     | vocab_size
train --model.norm-eps -1                                       | norm_eps
train --model.file missing.json                                 | missing.json
train --model.file bad.json                                     | bad.json
train --model.file list.json                                    | list.json
train --model.file neox.json                                    | training recipe
train --model.file gemma.json                                   | gemma
train --model.file bert.json                                    | bert
train --model.file qwen3.json                                   | qwen3
train --model.file no_type.json                                 | model_type
train --model.file yarn.json                                    | rope_scaling
train --model.file biases.json                                  | attention_bias
train --model.file window.json                                  | sliding_window
train --model.file gelu.json                                    | hidden_act
train --model.file heads.json                                   | heads; 7
train --model.file kv_heads.json                                | heads; 3
train --model.file experts.json                                 | num_local_experts
train --model.file no_layers.json                               | num_hidden_layers
train --model.file text_layers.json                             | num_hidden_layers; four
train --model.file model.toml                                   | layers; tied
train --model.file misspelled_model.toml                        | layer
train --data.path missing                                       | missing
train --data.path tiny.txt                                      | data.path; data.seq_len
train --data.path no_text.jsonl                                 | line 2; 'text'; title; data.field
train --data.path no_json.jsonl                                 | line 1; JSON
train --data.path cut.jsonl.gz                                  | cut.jsonl.gz; damaged
train --data.path tiny.txt --data.field body                    | data.field has no effect
train --data.seq-len 0                                          | data.seq_len
train --data.seq-len 1000000000                                 | seq_len
train --data.tokenizer words                                    | words
train --data.validation-fraction 1.5                            | validation_fraction; 1.5
train --data.tokenizer bpe --data.bpe-vocab-size 3              | bpe_vocab_size
train --optimizer.lr -1                                         | optimizer.lr
train --optimizer.lr nan                                        | optimizer.lr
train --optimizer.lr inf                                        | optimizer.lr; finite
train --optimizer.betas 0.9 1.5                                 | optimizer.betas
train --optimizer.betas 0.9                                     | betas
train --optimizer.clip-grad-norm 0                              | clip_grad_norm
train --optimizer.weight-decay -1                               | weight_decay
train --model.family lama                                       | there is no model family 'lama'; did you mean 'llama'
train --optimizer.name adam                                     | there is no optimizer; did you mean 'adamw'
train --optimizer.name sgd --optimizer.eps 1e-6                 | optimizer.eps has no effect with optimizer.name sgd
train --optimizer.settings rank                                 | optimizer.settings must be texts such as name=0.5
train --training.steps 0                                        | training.steps
train --training.steps 1e9                                      | training.steps
train --training.dtype float8                                   | float8
train --training.dtype float16                                  | float16
train --training.device cuda                                    | cuda
train --training.device tpu                                     | tpu
train --training.threads 0                                      | training.threads
train --training.stall-timeout-s 0                              | stall_timeout_s
train --output.folder /dev/null/run                             | /dev/null/run
train --output.trace-step 0                                     | trace_step
train --checkpoint.every 0                                      | checkpoint.every
train --checkpoint.keep 0                                       | checkpoint.keep
train --checkpoint.keep-every 10                                | checkpoint.keep
train --checkpoint.resume missing                               | missing
train --checkpoint.resume .                                     | checkpoint
train --checkpoint.final maybe                                  | maybe
verify --layout.pp 0                                            | layout.pp
verify missing.toml                                             | missing.toml
verify --model.file neox.json                                   | memory
verify --model.hidden-size 6000000                              | memory
verify --training.steps 3                                       | has no effect on verify
train --restart.times -1                                        | restart.times must be at least 0; -1
train --restart.times 1.5                                       | restart.times; 1.5
train --restart.times many                                      | restart.times; many
train --restart.time 2                                          | --restart.times
train --restart.layout plan                                     | restart.layout has no effect without restart.times
train --restart.keep-every 5                                    | restart.keep_every has no effect without restart.times
train --restart.layout plan --restart.keep-every 5              | restart.layout, restart.keep_every; restart.times
train --restart.times 1 --restart.keep-every 0                  | restart.keep_every must be at least 1
train --restart.times 1 --restart.keep-every x                  | --restart.keep-every; 'x'
train --restart.times 1 --restart.layout other                  | restart.layout; other
train --restart.times 0 --restart.layout plan                   | restart.layout has no effect without restart.times
train --restart.times 1 --restart.layout                        | restart.layout
train --restart.times 1 --training.stall-timeout-s 0            | stall_timeout_s
train restart_key.toml                                          | restart.time; 'restart.times'
train restart_types.toml                                        | restart.times; restart.keep_every
simulate --restart.times 1                                      | restart.times has no effect on simulate
verify --restart.times 1                                        | restart.times has no effect on verify
inspect missing                                                 | there is no run folder missing
inspect .                                                       | has no actions/ with what its ranks did last
inspect empty.toml                                              | there is no run folder empty.toml
inspect                                                         | RUN
inspect missing --jsn                                           | missing; jsn
inspect . .                                                     | .
export missing out                                              | missing
export . out                                                    | checkpoint
export . out --dtype int4                                       | int4
export . out --file-gb 0                                        | file-gb
export                                                          | CHECKPOINT
report missing                                                  | missing
report missing --outptu x                                       | missing; --output
plan --devices x --model nope                                   | --devices must; --cluster, --global-batch; nope
report .                                                        | config.toml
report                                                          | RUN
plan                                                            | model; cluster; devices
plan --model llama-3-9b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128    | llama-3-8b
plan --model llama-3-8b --cluster dgx-h101 --devices 8 --global-batch 8 --seq 128    | dgx-h100
plan --model llama-3-8b --cluster DGX_A101 --devices 8 --global-batch 8 --seq 128    | dgx-a100
plan --model llama-3-8b --cluster dgx-h100 --devices 0 --global-batch 8 --seq 128    | devices
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 0 --seq 128    | batch
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 0      | seq
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --pp 3        | pp
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --families x  | x
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --best 0      | best
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --budget-s -1 | budget
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --strategies fly    | fly
plan --model llama-3-8b --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128 --pp 8 --out /dev/null/x | /dev/null/x
plan --model neox.json --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128     | gpt_neox
plan --model gemma.json --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128    | gemma
plan --model yarn.json --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128     | rope_scaling
plan --model llama-3-8b --cluster broken.toml --devices 8 --global-batch 8 --seq 128 | broken.toml
plan --model llama-3-8b --cluster empty.toml --devices 8 --global-batch 8 --seq 128  | empty.toml
plan missing.toml                                               | missing.toml
plan --model missing.json --cluster dgx-h100 --devices 8 --global-batch 8 --seq 128    | missing.json
plan --model llama-3-8b --cluster missing.toml --devices 8 --global-batch 8 --seq 128  | missing.toml
tradeoff                                                        | model; cluster; seq
tradeoff --model llama-3-8b --cluster dgx-h100 --seq 0          | seq
tradeoff --model llama-3-8b --cluster dgx-h100 --seq 128 --devices 0     | device
tradeoff --model llama-3-8b --cluster dgx-h100 --seq 128 --methods fast  | fast
tradeoff --model bert.json --cluster dgx-h100 --seq 128         | bert
tradeoff --model llama-3-8b --cluster dgx-h100 --seq 128 --batch-per-device 1/0     | 1/0
simulate missing.toml                                           | missing.toml
simulate --model.file missing.json                              | missing.json
simulate unknown_key.toml                                       | layout.ppp
simulate --machine.cluster dgx-h200                             | h200
simulate --machine.cluster nowhere                              | nowhere
simulate --machine.software nothing                             | nothing
simulate --machine.cluster broken.toml                          | broken.toml
simulate --model.file neox.json                                 | have no formulas
simulate --model.file window.json                               | sliding_window
simulate --layout.pp 0                                          | layout.pp
simulate --layout.pp 100000000 --model.num-layers 100000000     | memory
simulate --layout.num-microbatches 1000000000                   | memory
simulate --json --plot /dev/null/x.png                          | /dev/null/x.png
slices --layout.pp 0                                            | layout.pp
slices --unit 0                                                 | unit
survive                                                         | --checkpoint-time; --mtbf
survive --mtbf soon --checkpoint-time 20s                       | --mtbf must be
survive --mtbf 1y --checkpoint-time never --restart-time 0s     | --checkpoint-time must be; --restart-time must be
survive --mtbf 1y --storage 0 --layout.pp 0                     | --storage must be; layout.pp must be
survive --mtbf 1y --trace README.md --storage 1                 | --mtbf and --trace
survive --trace missing.csv --storage 1                         | missing.csv
survive --trace broken.toml --storage 1                         | hours, node, state
launch                                                          | --out
launch --out /dev/null/x                                        | /dev/null/x
launch --out there --to kubernetes                              | kubernetes
launch --out there --layout.pp 0                                | layout.pp
launch --out there --time-limit soon                            | time limit; soon
schedule                                                        | FAMILY
schedule 1f2b                                                   | did you mean '1f1b'?
schedule 1f1b --pp 0                                            | --pp must be
slices --unit 0 --layout.pp 0                                   | --unit must be; layout.pp must be
tradeoff --model nope                                           | missing; there is no model
schedule 1f1b --num-microbatches 0                              | --num-microbatches must be
schedule 1f1b --pp 100000000                                    | memory
schedule 1f1b --num-microbatches 1000000000                     | memory
schedule 1f1b --loops 2                                         | use depth-first or loops 1
schedule breadth-first --placement zigzag                       | there is no placement 'zigzag'
schedule 1f1b --forward -1                                      | forward
schedule 1f1b --forward nan                                     | forward
schedule 1f1b --budget 1                                        | budget
schedule 1f1b --plot picture.xyz                                | picture.xyz; expected a file ending in one of .png
schedule 1f1b --plot /dev/null/x.png                            | /dev/null/x.png
schedule missing.txt                                            | missing.txt
schedule not_a_schedule.txt                                     | hello
schedule huge_microbatch.txt                                    | 2147483647
schedule huge_stage.txt                                         | 99999999
schedule deadlock.txt                                           | rank 0
schedule twice.txt                                              | 0F0
schedule no_backward.txt                                        | 0F1
schedule empty.txt                                              | empty.txt
schedule negative.txt                                           | 0F-1
schedule bad.csv                                                | xx
schedule 1f1b --format yaml                                     | yaml
families --pp 0                                                 | pp
families --loops 0                                              | loops
families --num-microbatches x                                       | microbatches
families --num-microbatches 1000000000                              | memory
profile --processes 0                                           | processes
profile --output /dev/null/c.toml                               | /dev/null/c.toml
profile --device tpu                                            | tpu
profile --budget-s 0                                            | budget
validate                                                        | expected one table; TABLE.csv
validate missing.csv                                            | cannot read the table; missing.csv
validate no_columns.csv                                         | column
validate header_only.csv                                        | row
validate bad_row.csv                                            | bad_row.csv
"""
"""A command a line, and behind the bar what its message must contain."""


def wrong_inputs() -> list[tuple[str, list[str], list[str]]]:
    """For each wrong input the command as one text, its words, and what its message must contain."""
    cases: list[tuple[str, list[str], list[str]]] = []
    for line in WRONG.strip("\n").splitlines():
        command, _, parts = line.rpartition(" | ")
        cases.append((command.strip(), command.split(), [part.strip() for part in parts.split(";")]))
    return cases


def write_named_files(words: list[str], folder: Path) -> None:
    """Write the files that the words name."""
    for name in set(words) & set(FILES):
        (folder / name).write_text(FILES[name], encoding="latin-1" if name.startswith("latin") else "utf-8")
