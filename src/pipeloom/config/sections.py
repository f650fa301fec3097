"""The sections of a run's configuration. The string below a field is its help text, which explains ``None`` as well."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pipeloom.config.tokenizer_files import num_tokens
from pipeloom.terminal.words import parse_bytes
from pipeloom.workload.adapter import Target
from pipeloom.workload.dtypes import Dtype, MatmulDtype, default_dtype
from pipeloom.workload.limits import (
    ClusterName,
    Common,
    Count,
    CountOrNone,
    FamilyName,
    Fraction,
    Limits,
    Names,
    PlacementName,
    Positive,
    ProgramName,
    Seed,
)
from pipeloom.workload.optimizers import OPTIMIZERS, SHARED, Optimizer, Setting
from pipeloom.workload.update import Clip, Update


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several texts of a run."""

    path: Path
    """File of text or records, or a folder of them, as data.path."""
    weight: float = 1.0
    """Its share of the training windows, relative to the weights of the other sources."""
    field: str = "text"
    """Name of the text in each record, as data.field."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokenizer and sequence length."""

    path: Common[Path | None] = None
    """File of text or records, or a folder of them. Records: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, or a
    folder that save_to_disk of the datasets library wrote. Parquet, Arrow and zst need pipeloom[data]. None: Python's
    standard library; no default for a model from model.preset or model.file."""
    field: str = "text"
    """Name of the text in each record: a key of JSON lines, or a column."""
    sources: tuple[SourceConfig, ...] | None = None
    """Several texts, each a table [[data.sources]] of a run file with path, weight (1 by default) and field (text by
    default). Training windows are drawn in the shares of the weights, which a resumed run may change. Replaces path
    and field; the flag --data.path replaces it. None: one text."""
    tokenizer: Common[Literal["bytes", "bpe"] | Path | None] = None
    """Tokenizer, or its tokenizer.json. bpe is byte-pair encoding trained on the text. A path is that of the
    file, or of a Hugging Face folder with one. All but bytes need pipeloom[bpe]. None: bytes; no default for a model
    from model.preset or model.file."""
    bpe_vocab_size: Annotated[int, Limits(least=257)] = 4096  # the 256 bytes and end of text
    """Vocabulary size of the byte-pair encoding; with tokenizer bpe only."""
    seq_len: Common[Count] = 128
    """Sequence length, in tokens."""
    pack: Literal["stream", "best-fit"] | None = None
    """How documents fill windows. stream: one after the other; a window may end anywhere in a document. best-fit: only
    documents longer than a window are cut; the rest of a window is padded with tokens that are not targets. None:
    stream, or best-fit for records with answers."""
    attention: Literal["window", "document"] = "window"
    """What a token attends to. window: every earlier token of its window. document: those of its own document, in which
    positions count from 0; the first token of a document is then no target. On CPUs attention takes longer and more
    memory than with window, since its kernel has a mask and skips nothing."""
    validation_fraction: Annotated[float, Limits(above=0, most=1)] = 0.05
    """Fraction of the text that is held out for validation."""
    cache: Path | None = None
    """Folder for tokenized text. None: pipeloom/ in the user's cache folder."""

    @property
    def by_document(self) -> bool:
        """Whether attention ends at the borders of documents."""
        return self.attention == "document"

    @property
    def parts(self) -> tuple[tuple[float, "DataConfig"], ...]:
        """Each source: its weight, and the settings of a run with that text alone."""
        if self.sources is None:
            return ((1.0, self),)
        return tuple((one.weight, replace(self, path=one.path, field=one.field, sources=None)) for one in self.sources)

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer: the bytes and end of text, the size set for byte-pair encoding, or those of a file.

        Raises:
            UserError: the file cannot be read.
        """
        if isinstance(self.tokenizer, Path):
            return num_tokens(self.tokenizer)
        return 257 if self.known_tokenizer == "bytes" else self.bpe_vocab_size

    @property
    def known_tokenizer(self) -> Literal["bytes", "bpe"] | Path:
        """``tokenizer``, or its default."""
        return self.tokenizer or "bytes"

    @property
    def tokenizer_kind(self) -> Literal["bytes", "bpe", "file"]:
        """How text becomes tokens, wherever the file is."""
        return "file" if isinstance(self.tokenizer, Path) else self.tokenizer or "bytes"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Order of the actions on each pipeline rank, recomputation, and moves of activations and stages."""

    family: Common[FamilyName | Literal["auto"]] = "auto"
    """Family of pipeline schedules. `pipeloom families` compares them. auto: breadth-first. Without a pipeline
    (layout.pp 1), auto is depth-first, where a backward follows each forward, except for several layout.loops with
    device_budget, layout.shard full or few gradient_buffers, where each visit of a stage takes a transfer."""
    group_size: int | None = None
    """Micro-batches that a rank runs on one virtual stage before the next; hybrid only. None: pp / slices, rounded
    up."""
    placement: PlacementName | None = None
    """Placement of stages on ranks. None: that of the family, otherwise looped."""
    keep: tuple[int, ...] | None = None
    """For each pipeline rank, the number of stage inputs whose activations it keeps; the others are recomputed. None:
    all."""
    receive_buffers: Count = 2
    """Receives posted ahead on each directed edge between two ranks."""
    residency: Count | None = None
    """With layout.shard full: maximum number of stages whose gathered weights a rank holds at once. None: 2."""
    prefetch: CountOrNone | None = None
    """With layout.shard: maximum number of stages that a gather of sharded weights may be ahead of its use. None: 1."""
    gradient_buffers: Count | None = None
    """With layout.shard gradients or full: maximum number of stages whose unreduced gradients a rank holds. None:
    all."""
    balance: bool = False
    """Move activations between full and empty pipeline ranks (BPipe)."""
    offload: bool = False
    """Move activations beyond activation_budget to host memory."""
    activation_budget: str | None = None
    """Memory for activations per rank, such as 20GB. With balance, only activations beyond it move. None: with
    balance, each pair of ranks shares evenly."""

    device_budget: str | None = None
    """Bytes of weights, gradients and optimizer state on the device at once, such as 64MiB or 20GB. Stages stay in host
    memory and are swapped in for their actions, one stage ahead. With a single rank, or with experts that no other rank
    has (layout.ep of layout.dp), whose bytes alone count then. Activations and workspace are not counted. Without
    layout.partition, the model of a single rank is cut into stages of nearly equal bytes. None: the whole model is on
    the device."""
    swap_folder: Path | None = None
    """With device_budget: folder for the stages that are not on the device. Its files are unlinked, so that nothing
    remains however the run ends. None: host memory."""

    file: Path | None = None
    """Schedule file to execute unchanged; simulate, plan and every run write one. It must match the other settings.
    None: the schedule is made from the settings."""

    @property
    def budget_bytes(self) -> int | None:
        """``device_budget`` in bytes; it must have no problems."""
        return None if self.device_budget is None else parse_bytes(self.device_budget)

    @property
    def activation_bytes(self) -> int | None:
        """``activation_budget`` in bytes; it must have no problems."""
        return None if self.activation_budget is None else parse_bytes(self.activation_budget)

    @property
    def known_residency(self) -> int:
        """``residency``, or its default."""
        return 2 if self.residency is None else self.residency

    @property
    def known_prefetch(self) -> int:
        """``prefetch``, or its default."""
        return 1 if self.prefetch is None else self.prefetch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its learning rate."""

    name: Annotated[str, Names("optimizers")] = "adamw"
    """Update rule. docs/extending.md describes how to add one."""
    lr: Common[Positive | None] = None
    """Peak learning rate. None: 3e-3; no default for a model from model.preset or model.file."""
    lr_warmup_steps: CountOrNone | None = None
    """Steps of linear learning-rate warm-up. None: 10; no default for a model from model.preset or model.file."""
    lr_min_fraction: Fraction | None = None
    """Learning rate at the end of the decay, as a share of lr; not with lr_decay_style constant. None: 0.1."""
    lr_decay_style: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. cosine and linear: until the last step. constant: not at all. wsd
    (warm-up, stable, decay): linearly, in the last lr_wsd_decay_steps."""
    lr_wsd_decay_steps: Count | None = None
    """With lr_decay_style wsd: steps of the decay. None: a tenth of training.steps, rounded up."""
    betas: tuple[float, float] | None = None
    """Decay rates of the first and second moment; adamw. None: 0.9 0.95."""
    eps: Positive | None = None
    """Added to the root of the second moment; adamw. None: 1e-8."""
    momentum: Fraction | None = None
    """Momentum; sgd. None: 0.9."""
    weight_decay: Annotated[float, Limits(least=0)] | None = None
    """Weight decay of matrices: decoupled with adamw, added to the gradient with sgd. None: 0.1."""
    settings: tuple[str, ...] = ()
    """Settings of a plug-in's update rule that have no key here, each as name=number."""
    clip_grad_norm: Annotated[float, Limits(above=0, most=math.inf)] | None = None
    """Largest gradient norm; larger gradients are scaled down to it. inf for no clipping. None: 1."""
    clip: Clip = "whole"
    """Of which gradient clip_grad_norm limits the norm. whole: of the whole model. stage: of each stage by itself, so
    that the result depends on the stages. none: no clipping."""
    outer_lr: Positive | None = None
    """With layout.average_every: rate of the outer step, whose gradient is the mean way of the replicas back to where
    they began. 1 without momentum is the plain mean of their weights. None: 0.7."""
    outer_momentum: Annotated[float, Limits(least=0, most=1)] | None = None
    """With layout.average_every: Nesterov momentum of the outer step. None: 0.9."""
    outer_delayed: bool = False
    """With layout.average_every: whether an average runs in the background of the next step, whose end uses it.
    Otherwise replicas wait for it."""
    update: Literal["step", "stage"] = "step"
    """When weights are updated. step: after the gradients of all stages. stage: each stage within the step, when its
    gradient is complete, whose memory the next stages then use. With the same results."""
    wide_weights: bool = True
    """Whether bfloat16 weights are updated in a float32 copy of them. false, with lomo and adalomo: without a copy, and
    rounded up or down by chance, so that small changes are not lost."""

    @property
    def rule(self) -> Optimizer:
        """The update rule ``name``; a ``UserError`` if it is unknown."""
        return OPTIMIZERS.find(self.name)

    @property
    def given(self) -> dict[str, Setting]:
        """Name -> value of the rule's settings that are set, including those of ``settings``."""
        own = {name: getattr(self, name) for name in SHARED if getattr(self, name) is not None}
        return own | {name: float(value) for name, _, value in (text.partition("=") for text in self.settings)}

    @property
    def values(self) -> dict[str, Any]:
        """Name -> value of all settings of the rule, with its defaults."""
        return {**self.rule.settings, **self.given}

    @property
    def known_lr(self) -> float:
        """``lr``, or its default."""
        return 3e-3 if self.lr is None else self.lr

    @property
    def known_lr_warmup_steps(self) -> int:
        """``lr_warmup_steps``, or its default."""
        return 10 if self.lr_warmup_steps is None else self.lr_warmup_steps

    @property
    def known_lr_min_fraction(self) -> float:
        """``lr_min_fraction``, or its default."""
        return 0.1 if self.lr_min_fraction is None else self.lr_min_fraction

    @property
    def known_outer(self) -> tuple[float, float]:
        """``outer_lr`` and ``outer_momentum``, or their defaults."""
        rate, momentum = self.outer_lr, self.outer_momentum
        return 0.7 if rate is None else rate, 0.9 if momentum is None else momentum

    def wsd_decay_steps(self, num_steps: int) -> int:
        """``lr_wsd_decay_steps``, or its default for so many steps of training."""
        return self.lr_wsd_decay_steps or -(-num_steps // 10)

    @property
    def known_clip_grad_norm(self) -> float:
        """``clip_grad_norm``, or its default; infinity without clipping."""
        limit = 1.0 if self.clip_grad_norm is None else self.clip_grad_norm
        return math.inf if self.clip == "none" else limit

    @property
    def known_update(self) -> Update:
        """When weights are updated, and of which gradient the norm is limited."""
        clips = math.isfinite(self.known_clip_grad_norm)
        return Update(within_step=self.update == "stage", clip=self.clip if clips else "none")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapters (LoRA) of frozen weights, as in PEFT."""

    rank: Count | None = None
    """Rank of the pair of matrices that each target gets. Pairs alone are trained: all other weights have neither
    gradient nor optimizer state. With training.freeze_layers, only the layers behind those have pairs. None: no
    adapters."""
    targets: tuple[Target, ...] | None = None
    """Matrices of a layer that have a pair: q, k, v and o of attention; gate, up and down of the feed-forward block.
    None: q v."""
    alpha: Positive | None = None
    """What a pair adds is multiplied by alpha / rank. None: 8."""
    init: Literal["zeros", "random"] | None = None
    """First values of the second matrix of each pair. zeros: training begins with the function of the base weights.
    random: as init_lora_weights False of PEFT. None: zeros."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop."""

    steps: Common[Count | None] = None
    """Optimizer steps. None: 200; no default for a model from model.preset or model.file."""
    seed: Seed = 0
    """Random seed of the weights, the order of the data and the sample."""
    dtype: Common[Dtype | None] = None
    """Data type of weights and activations. With bfloat16 the optimizer updates weights in float32, and gradients are
    accumulated in float32, over micro-batches and over replicas. train does not compute in float16; float64 has no
    predictions. None: float32 on CPUs; on GPUs bfloat16, or float16 in predictions for devices that lack it."""
    matmul_dtype: MatmulDtype | None = None
    """Data type of the operands of linear layers, in predictions and exports; train does not cast them. Attention,
    head, embedding, weights and activations keep dtype. None: dtype."""
    device: Common[Literal["cpu", "cuda"]] = "cpu"
    """Device type. With cuda, each process takes one GPU."""
    threads: Count = 1
    """CPU threads of each process."""
    compile: bool = False
    """Compile embedding, layers and head with torch.compile. Equal layers share the code. Takes a minute or more before
    the first step, less with the cache on disk. Not with layout.token_slices, nor with schedule.device_budget."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """With compile: backend of torch.compile. inductor generates code, which needs a C++ compiler on CPUs and a C
    compiler on CUDA. aot_eager only traces forward and backward, to test that they compile; it needs no compiler, and
    is not faster."""
    validation_batches: CountOrNone = 8
    """Number of batches for the validation loss; 0 for none."""
    validate_every: Count | None = None
    """Steps between validations. Step times do not include them. None: only after the last step."""
    on_spike: Literal["stop", "skip", "rollback"] = "stop"
    """What a run does with a step whose loss or gradient norm is NaN, infinite or above the limits below. stop: it
    ends; checkpoints before remain. skip: weights and moments stay, and the next batch follows. rollback: it goes back
    to its newest checkpoint, and leaves out the batches since. After ten such steps in a row it ends."""
    spike_loss: Annotated[float, Limits(above=1)] | None = None
    """Limit of a step's loss, as a multiple of the median of the last 50 good steps, once there are 20. None: no
    limit."""
    spike_grad_norm: Annotated[float, Limits(above=1)] | None = None
    """The same of a step's gradient norm, before clipping. None: no limit."""
    check_every: Count | None = None
    """Steps between checks of the ranks: copies of the same weights are compared, and all ranks compute the same
    micro-batch of one stage. Between them, each step compares a digest of weights and optimizer state behind an update
    with one before the next. A wrong rank is named; the run ends, or goes back with on_spike rollback. None: no
    checks."""
    divide_every: Count | None = None
    """Steps after which the micro-batches of layout.microbatches are divided again among the replicas, by the seconds
    that these took for their last steps. The batch and its order stay as they are. None: they are not."""
    z_loss: Annotated[float, Limits(least=0)] = 0.0
    """Factor of the squared logarithm of the sum of exponentials of each token's logits, which the loss of training has
    in addition (PaLM: 1e-4); it keeps logits small. Validation and evaluation leave it out."""
    freeze_layers: CountOrNone | None = None
    """Layers from the first on that keep their weights, and the embedding with them; 0 freezes the embedding alone.
    Frozen weights have no gradient and no optimizer state, and stages with nothing else run no backward. None: all
    weights are trained."""
    sample_tokens: CountOrNone = 160
    """Length of the text sample at the end, in tokens; 0 for none."""
    predict: bool = True
    """Profile the stages and simulate the step before training, for comparison. Takes a few seconds."""
    run_ahead: Count = 32
    """With device cuda: maximum number of forwards and backwards that the host issues ahead of the device."""
    stall_timeout_s: Annotated[float, Limits(least=1)] = 60.0
    """Seconds that a rank waits for a tensor before it reports a stall and ends the run."""

    @property
    def known_dtype(self) -> Dtype:
        """``dtype``, or its default in training."""
        return self.dtype or default_dtype(is_gpu=self.device == "cuda")

    @property
    def known_steps(self) -> int:
        """``steps``, or its default."""
        return 200 if self.steps is None else self.steps


LogName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The run folder."""

    folder: Common[Path | None] = None
    """Run folder. It is created if it does not exist. None: outputs/ and the time of the start."""
    trace_step: Count = 10
    """Step whose trace and timeline are written, counted from the start of this run: of this one and four more, the
    one of median time. Where fewer follow, of as many as there are; a run shorter than the default traces its last."""
    profile: tuple[int, ...] | None = None
    """Steps, counted from 1, that torch.profiler records on every rank, in profile/ of the run folder. These steps take
    longer. None: none."""
    log: LogName | None = None
    """Program that also receives the metrics of each step. tensorboard: event files in tensorboard/ of the
    run folder, needs pipeloom[log]. wandb, mlflow: as their environment variables set server and project. None: only
    metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and from which one a run resumes."""

    every: Count | None = None
    """Steps between checkpoints. They are in checkpoints/ of the run folder. None: checkpoints by every_s alone."""
    every_s: Annotated[float, Limits(least=0)] = 1800.0
    """Maximum seconds between checkpoints, by the clock of rank 0, also with every; 0 for no limit."""
    keep: Count | None = None
    """Number of newest checkpoints to keep. None: all written by every and final, and others only while they are among
    the two newest."""
    time_limit_s: Positive | None = None
    """Seconds after its start by which the run writes a checkpoint and ends with status 75, on which schedulers start
    it again. None: no limit."""
    keep_every: Count | None = None
    """With keep: checkpoints of every such number of steps stay, too, however old they are. None: none."""
    background: bool = True
    """Whether a thread writes the checkpoints before the last step from a copy in host memory while training continues.
    Where the copies of a host's processes exceed half of its free memory, and otherwise, training waits."""
    grace_s: Annotated[float, Limits(least=0)] = 25.0
    """Seconds for a last checkpoint after Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP. The run completes its step, writes a
    checkpoint and ends; with 0 it ends at once, without a checkpoint. Launchers must wait longer: torchrun kills
    processes after 30 s, Slurm after its KillWait, 30 s by default."""
    final: Literal["none", "checkpoint", "safetensors"] = "safetensors"
    """Files after the last step: none, a checkpoint, or a checkpoint and its weights as safetensors."""
    init: Common[Path | None] = None
    """Folder of weights that a new run starts from. Of Hugging Face: with a config.json and safetensors files; it is
    then the default of model.file and, with a tokenizer.json, of data.tokenizer. Or a run folder or checkpoint, of
    which the optimizer's state is not read. A run that resumes does not read it again, and takes that of its first run
    alone. None: random weights by training.seed."""
    resume: Common[Path | None] = None
    """Checkpoint to resume from, or a run folder for its newest one. It may be from a run with another layout.
    Without a run file the settings are those of that run. training.steps counts from the first start. The run gets a
    new folder, unless output.folder is the same. None: a new run."""

    @property
    def start(self) -> Path | None:
        """The path that the first weights are read from; ``None`` for random ones."""
        return self.init if self.resume is None else self.resume


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """What happens when a process of a run fails. Under a launcher, the launcher starts processes again."""

    times: CountOrNone = 0
    """How often failures of each rank may start the processes of the run again. The run then resumes from the newest
    state that all ranks keep in shared memory, or else from the last checkpoint. 0: a failure ends the run."""
    layout: Literal["same", "plan"] = "same"
    """When a rank has failed more often. same: the run ends. plan: the planner chooses a layout of one rank less, and
    the run resumes with the same batches."""
    keep_every: Count | None = None
    """Steps between states in shared memory, of which each rank has two. None: 1."""

    @property
    def known_keep_every(self) -> int:
        """``keep_every``, or its default."""
        return self.keep_every or 1


WHAT_IFS = ("inter_bandwidth", "intra_bandwidth", "memory", "peak", "memory_bandwidth")
"""Settings of ``machine`` that change figures of the cluster."""


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Cluster and program of predictions and plans; train does not read this section."""

    cluster: Common[ClusterName] = "laptop"
    """Cluster: a name of the catalog, or a file (a name with a folder or .toml)."""
    software: Common[ProgramName] = "pipeloom"
    """Training program: a name of the catalog, or a file (a name with a folder or .toml). pipeloom overlaps transfers
    and reductions with compute."""
    attention: Literal["plain", "fused-softmax", "flash1", "flash2"] = "flash2"
    """Attention kernel. plain: separate kernels; fused-softmax: scale, mask and softmax in one kernel; flash1, flash2:
    FlashAttention."""
    fused_norm: bool = True
    """Whether a norm is one kernel."""
    expert_load: Annotated[float, Limits(least=1)] | None = None
    """With layout.ep: tokens of experts on the fullest of the ranks that share them / the mean, for which the others
    wait; a run's metrics have it as expert_rank_load. Memory and seconds are those of that rank. None: 1, equal
    loads."""
    inter_bandwidth: str | None = None
    """What if the bandwidth between nodes were another: a factor such as 2x, or GB/s of a node. None: as it is."""
    intra_bandwidth: str | None = None
    """The same for the bandwidth inside a node: a factor, or GB/s of a device. None: as it is."""
    memory: str | None = None
    """The same for the memory of a device: a factor, or GB. None: as it is."""
    peak: str | None = None
    """The same for the peak of a device in every precision: a factor, or TFLOP/s of 16 bits. None: as it is."""
    memory_bandwidth: str | None = None
    """The same for the memory bandwidth of a device: a factor, or GB/s. None: as it is."""

    @property
    def known_expert_load(self) -> float:
        """``expert_load``, or its default."""
        return self.expert_load or 1.0

    @property
    def what_if(self) -> dict[str, str]:
        """Changes of the cluster that are set, by name (``pipeloom.cost.what_if``)."""
        return {name: text for name in WHAT_IFS if (text := getattr(self, name)) is not None}

    def with_changes(self, changes: Mapping[str, str | None]) -> "MachineConfig":
        """The section with other changes of the cluster."""
        return replace(self, **cast("Any", dict(changes)))
