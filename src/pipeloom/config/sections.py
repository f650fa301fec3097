"""The sections of a run's configuration. Every field carries its documentation below it.

``None`` always has a stated meaning.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeloom.config.paths import NameOrFile
from pipeloom.terminal.words import parse_bytes
from pipeloom.workload.dtypes import Dtype, default_dtype
from pipeloom.workload.limits import Count, CountOrNone, Fraction, Limits, Positive
from pipeloom.workload.optimizers import OPTIMIZERS, SHARED, Optimizer, Setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text."""

    path: Path | None = None
    """A text file, or a folder of them. None: the sources of the running Python's standard library; no default for a
    model from model.preset or model.file."""
    tokenizer: Literal["bytes", "bpe"] | None = None
    """bytes: one token a byte. bpe: byte-pair encoding trained on the corpus (needs pipeloom[bpe]). None: bytes; no
    default for a model from model.preset or model.file."""
    bpe_vocab_size: Annotated[int, Limits(least=257)] = 4096  # the 256 bytes and end of text
    """Tokens of the byte-pair encoding; used with tokenizer bpe only."""
    seq_len: Count = 128
    """Tokens of a sequence."""
    validation_fraction: Annotated[float, Limits(above=0, most=1)] = 0.05
    """Share of the text that is kept for validation."""
    cache: Path | None = None
    """Folder for tokenized text. None: pipeloom/ in the user's cache folder."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer: the bytes and end of text, or the size set for byte-pair encoding."""
        return 257 if self.known_tokenizer == "bytes" else self.bpe_vocab_size

    @property
    def known_tokenizer(self) -> Literal["bytes", "bpe"]:
        """With its default."""
        return self.tokenizer or "bytes"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The order of work on each pipeline rank."""

    family: str = "breadth-first"
    """Family of schedules; `pipeloom schedule --help` lists them."""
    group_size: int | None = None
    """Micro-batches that go through one local stage before the next; hybrid only. None: pp / slices, rounded up."""
    placement: str | None = None
    """Stage -> rank: looped, v or linear. None: the one that the family runs on, else looped."""
    keep: tuple[int, ...] | None = None
    """For each pipeline rank the stage inputs that it keeps with everything computed from them until their backwards;
    the others are recomputed, one by one, as few as possible. None: all."""
    receive_buffers: Count = 2
    """Receives posted ahead and not yet used, for each directed edge between two ranks."""
    residency: Count | None = None
    """Stages whose gathered weights a rank holds at once, with layout.shard full. None: 2."""
    prefetch: CountOrNone | None = None
    """How many stages ahead a gather of sharded weights may start. None: 1."""
    gradient_buffers: Count | None = None
    """Stages whose unreduced gradients a rank has room for, with layout.shard gradients or full. None: all of its
    stages."""
    balance: bool = False
    """Whether pipeline ranks that keep much for backwards move some of it to ranks that keep little, and fetch it back
    (BPipe)."""
    offload: bool = False
    """Whether ranks move what activation_budget has no room for to the memory of the host, and fetch it back."""
    activation_budget: str | None = None
    """What each rank has for what backwards need, such as 64MiB or 20GB. With balance, ranks move no more than that
    takes. None: with balance, each pair of ranks shares evenly."""

    device_budget: str | None = None
    """Most bytes of weights, gradients and optimizer state on the device at once, such as 64MiB or 20GB: stages live in
    the memory of the host, come to the device when their turn is, one ahead, and go again. One rank only. Activations
    and work space come on top; without layout.partition, stages are alike in bytes. None: everything is on the
    device."""
    swap_folder: Path | None = None
    """Folder for the stages that are not on the device, in files without a name, of which nothing is left however the
    run ends; with device_budget. None: memory of the host."""

    file: Path | None = None
    """A schedule file, as simulate, plan and every run write it: the run executes it as it is, if it fits the other
    settings. Where the file says how it was made, they have to be the same. None: the schedule is made."""

    @property
    def title(self) -> str:
        """Family, or the name of the file that has the schedule; for people."""
        return self.family if self.file is None else self.file.name

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of ``device_budget``, which is without problems."""
        return None if self.device_budget is None else parse_bytes(self.device_budget)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of ``activation_budget``, which is without problems."""
        return None if self.activation_budget is None else parse_bytes(self.activation_budget)

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
    """The update rule and its learning rate."""

    name: str = "adamw"
    """adamw, sgd, or an optimizer of another distribution (docs/extending.md)."""
    lr: Positive | None = None
    """Peak learning rate. None: 3e-3; no default for a model from model.preset or model.file."""
    lr_warmup_steps: CountOrNone | None = None
    """Steps over which the learning rate rises from 0. None: 10; no default for a model from model.preset or
    model.file."""
    lr_min_fraction: Fraction = 0.1
    """Share of lr that the cosine ends at."""
    betas: tuple[float, float] | None = None
    """Decay of the first and second moment; adamw. None: 0.9 0.95."""
    eps: Positive | None = None
    """Added to the root of the second moment; adamw. None: 1e-8."""
    momentum: Fraction | None = None
    """Share of the momentum that a step keeps; sgd. None: 0.9."""
    weight_decay: Annotated[float, Limits(least=0)] | None = None
    """Weight decay, on matrices only; decoupled with adamw, added to the gradient with sgd. None: 0.1."""
    settings: tuple[str, ...] = ()
    """Settings of an optimizer of another distribution that have no key here, each as name=number."""
    clip_grad_norm: Annotated[float, Limits(above=0, most=math.inf)] = 1.0
    """Largest norm of the whole model's gradient; inf clips nothing."""

    @property
    def rule(self) -> Optimizer:
        """What ``name`` stands for; a ``KeyError`` if that is nothing."""
        return OPTIMIZERS[self.name]

    @property
    def given(self) -> dict[str, Setting]:
        """The settings of the rule that are not left to its defaults; each of ``settings`` is a number by name."""
        own = {name: getattr(self, name) for name in SHARED if getattr(self, name) is not None}
        return own | {name: float(value) for name, _, value in (text.partition("=") for text in self.settings)}

    @property
    def values(self) -> dict[str, Any]:
        """All settings that the rule takes, with its defaults."""
        return {**self.rule.settings, **self.given}

    @property
    def known_lr(self) -> float:
        """With its default."""
        return 3e-3 if self.lr is None else self.lr

    @property
    def known_lr_warmup_steps(self) -> int:
        """With its default."""
        return 10 if self.lr_warmup_steps is None else self.lr_warmup_steps

    @property
    def clips(self) -> bool:
        """Whether an update needs the norm of the whole model's gradient."""
        return self.clip_grad_norm < math.inf


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: Count | None = None
    """Optimizer steps. None: 200; no default for a model from model.preset or model.file."""
    seed: int = 0
    """Seed of the weights, the order of the data and the sample."""
    dtype: Dtype | None = None
    """Type of weights and activations, for train, simulate and plan alike. With bfloat16 the optimizer updates weights
    in float32, and gradients are added up in float32, over micro-batches as over replicas. train does not compute in
    float16; float64 has no predictions. None: float32 on CPUs; on GPUs bfloat16, or float16 in predictions for devices
    that lack it."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the stages live. cuda takes one device for each process."""
    threads: Count = 1
    """CPU threads of each process."""
    compile: bool = False
    """Whether torch.compile compiles embedding, layers and head; layers that are alike share the code. Takes a minute
    or more before the first step, less where it is found on disk. Not with layout.token_slices, nor with
    schedule.device_budget."""
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """inductor: generates code, which takes a C++ compiler on CPUs and a C compiler on CUDA. aot_eager: only traces
    forward and backward, to see whether that works; needs no compiler and gains nothing."""
    validation_batches: CountOrNone = 8
    """Batches of the validation loss at the end; 0 for none."""
    sample_tokens: CountOrNone = 160
    """Tokens of the sample at the end; 0 for none."""
    predict: bool = True
    """Profile the stages before the first step and simulate the step, to compare at the end; takes a few seconds."""
    run_ahead: Count = 32
    """Forwards and backwards that the host may issue before a CUDA device has done them; with device cuda only."""
    stall_timeout_s: Annotated[float, Limits(least=1)] = 60.0
    """Seconds that a rank waits for a tensor before it reports a stall and ends the run."""

    @property
    def known_dtype(self) -> Dtype:
        """``dtype``, with its default where the run trains."""
        return self.dtype or default_dtype(is_gpu=self.device == "cuda")

    @property
    def known_steps(self) -> int:
        """With its default."""
        return 200 if self.steps is None else self.steps


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What the run leaves behind."""

    folder: Path | None = None
    """Run folder; made if it is not there. None: outputs/ and the time of the start."""
    trace_step: Count = 10
    """Step whose trace and timeline picture are written, counted from 1; the last one if there are fewer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state of the run is written, and from which one it goes on."""

    every: Count | None = None
    """Steps between checkpoints, which are written to checkpoints/ in the run folder. None: checkpoints come by
    every_s only."""
    every_s: Annotated[float, Limits(least=0)] = 1800.0
    """Seconds without a checkpoint after which one is written, also with every; 0 for never. The clock of rank 0
    decides."""
    keep: Count | None = None
    """How many checkpoints are kept, the newest ones. None: all that every or final set, and the others as long as they
    are among the two newest."""
    grace_s: Annotated[float, Limits(least=0)] = 25.0
    """Seconds after Ctrl-C, SIGTERM or SIGHUP in which the run ends its step, writes a checkpoint and ends; 0 to end at
    once, without a checkpoint. Less than what the launcher grants: torchrun kills after 30 s, Slurm after its KillWait,
    30 s by default."""
    final: Literal["none", "checkpoint", "safetensors"] = "safetensors"
    """What is written after the last step: nothing, a checkpoint, or a checkpoint and its weights as safetensors."""
    resume: Path | None = None
    """Where to go on: a checkpoint, or a run folder, which means its newest whole one. It may be of any other layout.
    training.steps counts from the first start. Writes a run folder of its own, unless output.folder is the same one.
    None: from new weights."""


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """What simulate predicts for; train runs on the machine it is started on and does not read this section."""

    cluster: NameOrFile = "laptop"
    """A cluster of the catalog by name, or a file like those, with a folder or .toml in its name."""
    software: NameOrFile = "pipeloom"
    """The training program: one of the catalog by name, or a file like those, with a folder or .toml in its name.
    pipeloom is this one: transfers and reductions run on lanes of their own."""
    attention: Literal["plain", "fused-softmax", "flash1", "flash2"] = "flash2"
    """Kernel of attention: three steps, softmax fused with scale and mask, or all in one (version 1 or 2)."""
    fused_norm: bool = True
    """Whether a norm is one kernel."""
