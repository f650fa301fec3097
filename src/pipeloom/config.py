"""What a run is told: frozen dataclasses, the one truth. Files and flags only override them.

Every field carries its documentation below it; ``None`` always has a stated meaning. ``problems`` judges the
whole configuration and reports everything that is wrong with it.
"""

import math
import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeloom.checkpoint_folder import find_checkpoint, list_checkpoints, read_info, run_of
from pipeloom.errors import UserError
from pipeloom.generate import Choice
from pipeloom.layout import Layout, Shard
from pipeloom.schedule import Kind
from pipeloom.toolchain import toolchain_problems


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer. Its sizes may come from the catalog or from a file; other settings stay as they are here."""

    preset: str | None = None
    """A model of the catalog by name, such as llama-3-8b, which gives all sizes. None: they are said here."""
    file: Path | None = None
    """A model file as those of the catalog (.toml), or a Hugging Face config.json, which gives all sizes. None: they
    are said here."""
    family: Literal["llama", "gpt2"] = "llama"
    """llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention. gpt2: LayerNorm, learned positions, GELU."""
    num_layers: int = 8
    """Transformer layers."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_heads: int = 6
    """Query heads; divides hidden_size."""
    num_kv_heads: int | None = None
    """Key and value heads, each shared by num_heads / num_kv_heads query heads. None: num_heads."""
    ffn_size: int | None = None
    """Inner width of the feed-forward layer. None: 4 x hidden_size for gpt2; for llama 8/3 of it, rounded up to a
    multiple of 32."""
    vocab_size: int | None = None
    """Tokens that the model knows. None: as many as the tokenizer has."""
    norm_eps: float = 1e-5
    """Added to the variance in normalisation."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies; llama only."""
    tied: bool = False
    """Whether embedding and head are one matrix. For simulate; train takes false."""

    def resolve(self, vocab_size: int) -> "ModelConfig":
        """The same model with every derived size filled in.

        Args:
            vocab_size: tokens of the tokenizer.
        """
        inner = 4 * self.hidden_size if self.family == "gpt2" else -(-8 * self.hidden_size // (3 * 32)) * 32
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            ffn_size=self.ffn_size or inner,
            vocab_size=self.vocab_size or vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text."""

    path: Path | None = None
    """A text file, or a folder of them. None: the sources of the running Python's standard library."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """bytes: one token a byte. bpe: byte-pair encoding trained on the corpus (needs pipeloom[bpe])."""
    bpe_vocab_size: int = 4096
    """Tokens of the byte-pair encoding; used with tokenizer bpe only."""
    seq_len: int = 128
    """Tokens of a sequence."""
    validation_fraction: float = 0.05
    """Share of the text that is kept for validation."""
    cache: Path | None = None
    """Folder for tokenized text. None: pipeloom/ in the user's cache folder."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer: the bytes and end of text, or as many as byte-pair encoding was asked for."""
        return 257 if self.tokenizer == "bytes" else self.bpe_vocab_size


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The order of work on each pipeline rank."""

    family: str = "breadth-first"
    """Family of schedules; `pipeloom schedule --help` lists them."""
    group_size: int | None = None
    """Micro-batches that go through one local stage before the next; hybrid only. None: pp."""
    placement: str = "looped"
    """Stage -> rank: looped, v or linear."""
    receive_buffers: int = 2
    """Receives posted ahead and not yet used, for each directed edge between two ranks."""
    residency: int | None = None
    """Stages whose gathered weights a rank holds at once, with layout.shard full. None: 2."""
    prefetch: int | None = None
    """How many stages ahead a gather of sharded weights may start. None: 1."""
    gradient_buffers: int | None = None
    """Stages whose unreduced gradients a rank has room for, with layout.shard gradients or full. None: all of its
    stages."""

    @property
    def known_residency(self) -> int:
        """With its default."""
        return 2 if self.residency is None else self.residency

    @property
    def known_prefetch(self) -> int:
        """With its default."""
        return 1 if self.prefetch is None else self.prefetch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate."""

    lr: float = 3e-3
    """Peak learning rate."""
    lr_warmup_steps: int = 10
    """Steps over which the learning rate rises from 0."""
    lr_min_fraction: float = 0.1
    """Share of lr that the cosine ends at."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_grad_norm: float = 1.0
    """Largest norm of the whole model's gradient; inf clips nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = 200
    """Optimizer steps."""
    seed: int = 0
    """Seed of the weights, the order of the data and the sample."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of weights and activations. With bfloat16 the optimizer updates weights in float32, and gradients are added
    up in float32, over micro-batches as over replicas."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the stages live. cuda takes one device for each process."""
    threads: int = 1
    """CPU threads of each process."""
    compile: bool = False
    """Whether torch.compile compiles embedding, layers and head; layers that are alike share the code. Takes a minute
    or more before the first step, less where it is found on disk. Not for schedules that split the backward."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generates code, which takes a C++ compiler on CPUs and a C compiler on CUDA. aot_eager: only traces
    forward and backward, to see whether that works; needs no compiler and gains nothing."""
    validation_batches: int = 8
    """Batches of the validation loss at the end; 0 for none."""
    sample_tokens: int = 160
    """Tokens of the sample at the end; 0 for none."""
    predict: bool = True
    """Profile the stages before the first step and simulate the step, to compare at the end; takes a few seconds."""
    stall_timeout_s: float = 60.0
    """Seconds that a rank waits for a tensor before it reports a stall and ends the run."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What the run leaves behind."""

    folder: Path | None = None
    """Run folder; made if it is not there. None: outputs/ and the time of the start."""
    trace_step: int = 10
    """Step whose trace and timeline picture are written, counted from 1; the last one if there are fewer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of the run is written, and from which one it goes on."""

    every: int | None = None
    """Steps between checkpoints, which are written to checkpoints/ in the run folder. None: only what final says."""
    keep: int | None = None
    """How many checkpoints are kept, the newest ones. None: all."""
    final: Literal["none", "checkpoint", "safetensors"] = "safetensors"
    """What is written after the last step: nothing, a checkpoint, or a checkpoint and its weights as safetensors."""
    resume: Path | None = None
    """Where to go on: a checkpoint, or a run folder, which means its latest one. It may be of any other layout.
    training.steps counts from the first start. Writes a run folder of its own, unless output.folder says the same one.
    None: from new weights."""


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """What simulate predicts for; train runs on the machine it is started on and does not read this section."""

    cluster: str = "laptop"
    """A cluster of the catalog by name, or a TOML file like those."""
    software: str = "pipeloom"
    """The training program: one of the catalog by name, or a TOML file like those. pipeloom is this one: transfers and
    reductions run on lanes of their own."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of weights and activations in products."""
    attention: Literal["plain", "fused-softmax", "flash1", "flash2"] = "flash2"
    """Kernel of attention: three steps, softmax fused with scale and mask, or all in one (version 1 or 2)."""
    fused_norm: bool = True
    """Whether a norm is one kernel."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    layout: Layout = field(default_factory=Layout)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def choice(self) -> Choice:
        """The schedule that the run trains with."""
        return Choice(
            family=self.schedule.family,
            pp=self.layout.pp,
            num_microbatches=self.layout.num_microbatches,
            loops=self.layout.loops,
            group_size=self.schedule.group_size,
            placement=self.schedule.placement,
        )

    def problems(self, *, trains: bool = True, is_model_known: bool = True) -> list[str]:
        """Everything that is wrong with the values, one sentence each; empty if nothing is.

        Args:
            trains: whether the run is trained here, so that its text has to be there and settings that only simulate
                understands are refused.
            is_model_known: whether the sizes of the model are what the run will have.
        """
        found = [*_range_problems(self), *_order_problems(self)]
        if is_model_known:
            found += [*_model_problems(self), *_stage_problems(self), *_tensor_problems(self)]
            found += _recompute_problems(self)
        found += _data_parallel_problems(self)
        if trains:
            found += [*_text_problems(self), *_checkpoint_problems(self), *_not_trainable(self)]
            found += _compile_problems(self)
        return found


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as nested dictionaries of TOML's types; fields that are ``None`` are left out."""
    tree: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            tree[item.name] = to_dict(value)
        elif value is not None:
            tree[item.name] = str(value) if isinstance(value, Path) else value
    return tree


_AT_LEAST: dict[str, float] = {
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.ffn_size": 1,
    "model.vocab_size": 2,
    "data.bpe_vocab_size": 257,
    "data.seq_len": 1,
    "layout.microbatch_size": 1,
    "layout.tp": 1,
    "layout.dp": 1,
    "layout.replicate": 1,
    "schedule.residency": 1,
    "schedule.prefetch": 0,
    "schedule.gradient_buffers": 1,
    "schedule.receive_buffers": 1,
    "optimizer.lr_warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "training.steps": 1,
    "training.threads": 1,
    "training.validation_batches": 0,
    "training.sample_tokens": 0,
    "training.stall_timeout_s": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "output.trace_step": 1,
}
_ABOVE_ZERO = (
    "data.validation_fraction",
    "model.norm_eps",
    "model.rope_theta",
    "optimizer.lr",
    "optimizer.eps",
    "optimizer.clip_grad_norm",
)
_FRACTIONS = ("data.validation_fraction", "optimizer.lr_min_fraction")


def _value(config: RunConfig, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _range_problems(config: RunConfig) -> list[str]:
    found = [
        f"{name} must be at least {least:g}, found {_value(config, name)}"
        for name, least in _AT_LEAST.items()
        if _value(config, name) is not None and not least <= _value(config, name) <= _most(name)
    ]
    found += [
        f"{name} must be above 0, found {_value(config, name)}"
        for name in _ABOVE_ZERO
        if not 0 < _value(config, name) <= _most(name)
    ]
    found += [
        f"{name} must lie between 0 and 1, found {_value(config, name)}"
        for name in _FRACTIONS
        if not 0 <= _value(config, name) <= 1
    ]
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        found.append(f"optimizer.betas must be at least 0 and below 1, found {config.optimizer.betas}")
    return found


def _most(name: str) -> float:
    """The largest value of a setting: every one is finite, but for a limit that may be switched off."""
    return math.inf if name == "optimizer.clip_grad_norm" else sys.float_info.max


def _model_problems(config: RunConfig) -> list[str]:
    model = config.model
    problems: list[str] = []
    if model.preset is not None and model.file is not None:
        problems.append("model.preset and model.file both give the sizes; leave one out")
    if model.num_heads > 0 and model.hidden_size % model.num_heads:
        problems.append(
            f"model.num_heads must divide model.hidden_size, found {model.num_heads} and {model.hidden_size}"
        )
    elif model.family == "llama" and model.num_heads > 0 and (model.hidden_size // model.num_heads) % 2:
        problems.append(
            "llama's rotary positions need an even model.hidden_size / model.num_heads, "
            f"found {model.hidden_size} / {model.num_heads}"
        )
    if model.num_kv_heads is not None and model.num_kv_heads > 0 and model.num_heads % model.num_kv_heads:
        problems.append(
            f"model.num_kv_heads must divide model.num_heads, found {model.num_kv_heads} and {model.num_heads}"
        )
    return problems


def _order_problems(config: RunConfig) -> list[str]:
    schedule = config.schedule
    found = config.choice().problems()
    names = {"pp ": "layout.pp ", "loops ": "layout.loops ", "the number of micro-batches ": "layout.num_microbatches "}
    problems = [next((new + p[len(old) :] for old, new in names.items() if p.startswith(old)), p) for p in found]
    if schedule.family == "forward-only":
        problems.append("schedule.family forward-only trains nothing; use breadth-first")
    return problems


def _stage_problems(config: RunConfig) -> list[str]:
    layout = config.layout
    problems: list[str] = []
    pieces = config.model.num_layers + 2
    if layout.num_stages > pieces:
        problems.append(
            f"{layout.pp} pipeline ranks x {layout.loops} loops need {layout.num_stages} stages, but "
            f"{config.model.num_layers} layers with embedding and head make only {pieces} pieces; "
            f"use {'fewer layout.loops' if layout.pp <= pieces else 'a smaller layout.pp'} or more model.num_layers"
        )
    if layout.partition is not None:
        problems += _partition_problems(layout, pieces)
    return problems


def _not_trainable(config: RunConfig) -> list[str]:
    """Settings that simulate understands and train cannot run yet."""
    problems: list[str] = []
    if config.model.tied:
        problems.append("model.tied true is for simulate only so far; train a model whose head has weights of its own")
    layout, num_tokens = config.layout, config.data.seq_len
    if layout.tp > 1 and num_tokens % layout.tp and not layout.sequence_parallel:
        problems.append(
            f"layout.tp must divide data.seq_len, since messages carry a share of the tokens, found {layout.tp} and "
            f"{num_tokens}"
        )
    return problems


def _tensor_problems(config: RunConfig) -> list[str]:
    layout, model = config.layout, config.model
    problems: list[str] = []
    for name, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if layout.tp > 0 and size is not None and size % layout.tp:
            problems.append(f"layout.tp must divide model.{name}, found {layout.tp} and {size}")
    if layout.sequence_parallel and layout.tp == 1:
        problems.append("layout.sequence_parallel splits over the ranks of layout.tp, found layout.tp 1")
    elif layout.sequence_parallel and layout.tp > 1 and config.data.seq_len % layout.tp:
        problems.append(f"layout.tp must divide data.seq_len, found {layout.tp} and {config.data.seq_len}")
    return problems


def _recompute_problems(config: RunConfig) -> list[str]:
    layout, wanted = config.layout, config.model.num_layers
    if layout.recompute_layers is None:
        return []
    problems: list[str] = []
    if layout.recompute != "none":
        problems.append("layout.recompute and layout.recompute_layers both say what is recomputed; leave one out")
    if len(layout.recompute_layers) != wanted:
        found = len(layout.recompute_layers)
        problems.append(f"layout.recompute_layers must name {wanted} layers (model.num_layers), found {found}")
    return problems


def _compile_problems(config: RunConfig) -> list[str]:
    training, choice = config.training, config.choice()
    if not training.compile:
        return []
    problems = toolchain_problems(training.device) if training.compile_backend == "inductor" else []
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    if not choice.problems() and any(row.is_kind(*halves).any() for row in choice.make().rows):
        problems.append(
            f"training.compile makes one function of a stage's backward, which schedule.family {choice.family} splits "
            "in two; leave training.compile out or use another family"
        )
    return problems


def _data_parallel_problems(config: RunConfig) -> list[str]:
    layout, schedule = config.layout, config.schedule
    problems: list[str] = []
    if layout.replicate is not None and layout.replicate > 0:
        if layout.shard == "none":
            problems.append("layout.replicate makes copies of what layout.shard shares out, found layout.shard none")
        if layout.dp % layout.replicate:
            problems.append(f"layout.replicate must divide layout.dp, found {layout.replicate} and {layout.dp}")
    wanted: dict[str, tuple[Shard, ...]] = {
        "residency": ("full",),
        "prefetch": ("optimizer", "gradients", "full"),
        "gradient_buffers": ("gradients", "full"),
    }
    problems += [
        f"schedule.{name} has no effect with layout.shard {layout.shard}; it takes {' or '.join(levels)}"
        for name, levels in wanted.items()
        if getattr(schedule, name) is not None and layout.shard not in levels
    ]
    return problems


def _partition_problems(layout: Layout, pieces: int) -> list[str]:
    partition = layout.partition or ()
    problems: list[str] = []
    if len(partition) != layout.num_stages:
        problems.append(f"layout.partition must name {layout.num_stages} stages, found {len(partition)}")
    if any(size < 1 for size in partition):
        problems.append(f"layout.partition must give every stage at least one piece, found {partition}")
    if sum(partition) != pieces:
        problems.append(f"layout.partition must add up to {pieces} (embedding, layers, head), found {sum(partition)}")
    return problems


def _text_problems(config: RunConfig) -> list[str]:
    path = config.data.path
    if path == Path():
        return ["data.path must be a text file or a folder, found nothing; leave it out for the default text"]
    try:
        is_missing = path is not None and not path.exists()
    except OSError:  # such as a name that is too long
        is_missing = True
    return [f"data.path must be a text file or a folder, found nothing at {path}"] if is_missing else []


def _checkpoint_problems(config: RunConfig) -> list[str]:
    resume, steps = config.checkpoint.resume, config.training.steps
    if resume is None:
        return []
    try:
        found = find_checkpoint(resume)
        done = read_info(found).step
    except (UserError, OSError) as error:  # an OSError such as a name that is too long
        return [f"checkpoint.resume: {error}"]
    problems: list[str] = []
    if steps <= done:
        problems.append(f"training.steps must be above {done}, the steps that {found} has done, found {steps}")
    folder = config.output.folder
    if folder is not None and run_of(found) == folder.absolute() and list_checkpoints(folder)[-1].name != found.name:
        problems.append(
            f"output.folder {folder} has checkpoints of later steps than {found.name}; "
            "resume from the latest one, or choose another output.folder"
        )
    return problems
