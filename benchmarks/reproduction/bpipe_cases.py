"""What is simulated of BPipe's case: models, layouts, training programs; and which of it is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from pipeloom.catalog import load_cluster, load_software
from pipeloom.cost.software import Software
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Attention
from reproduction.machine import MEGATRON, with_efficiency

CLUSTER = load_cluster("dgx-a100")
SCALING = load_software("scaling-2023a")
MICROBATCHES = (1, 2, 4)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ATTENTION: tuple[Attention, ...] = ("fused-softmax", "flash2")
SEQ = 2048


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    """A GPT-3 of these sizes."""
    return _shape(layers, hidden, heads, family="gpt2", ffn=4 * hidden, vocab=51200)


def _shape(layers: int, hidden: int, heads: int, *, family: str, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        family=family,
        vocab=vocab,
        tied=family == "gpt2",
    )


LLAMA = _shape(80, 8192, 64, family="llama", ffn=22016, vocab=32000)


@dataclass(frozen=True)
class Case:
    """A model in a layout that one of the papers used, or may have used.

    Attributes:
        model: its name there.
        shape: its sizes.
        tp, pp: tensor and pipeline axis.
        batch: sequences of a step.
    """

    model: str
    shape: ModelShape
    tp: int
    pp: int
    batch: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        shape = self.shape
        sizes = f"{shape.layers} x {shape.hidden}, {shape.heads} heads"
        return f"{self.model}: {sizes}, tp {self.tp}, pp {self.pp}, batch {self.batch}"


GPT_96B = Case("96B", gpt(80, 9984, 104), 4, 8)
LLAMA_65B = Case("LLaMA 65B", LLAMA, 4, 8)
CASES = (
    GPT_96B,
    replace(GPT_96B, batch=32),
    replace(GPT_96B, batch=64),
    replace(GPT_96B, batch=512),
    replace(GPT_96B, pp=12),
    replace(GPT_96B, tp=8, pp=6),
    Case("134B", gpt(96, 10752, 84), 4, 12),
    Case("134B", gpt(96, 10752, 96), 4, 12),
    Case("134B", gpt(96, 10752, 112), 4, 12),
    Case("134B", gpt(96, 10752, 112), 8, 6),
    Case("134B", gpt(88, 11264, 88), 4, 12),
    Case("134B", gpt(88, 11264, 88), 8, 6),
    LLAMA_65B,
)
"""The first one is what the re-evaluation is remembered to have run. The 48 GPUs of BPipe's paper are 12 x 4 or 6 x 8
here; which layout and which 134B it had is not known."""

COUNTED_SOFTMAX_BYTES = (2 * (6 + 8 + 8 + 8 + 6) + (6 + 12 + 8 + 8 + 6)) / 3.5
"""Bytes that Megatron-LM's unfused softmax moves for each score, counted in its source (``fused_softmax.py``): cast to
single precision, scale, mask, softmax, cast back; forward twice (selective recomputation) and backward once, for which
the cost model takes 1.5 forwards."""

FUSED_SOFTMAX_BYTES = 4.0
"""Bytes of the fused one (``pipeloom.cost.layers``)."""


def _with_kernels(software: Software, softmax_bytes: float) -> Software:
    """A program with the kernels that its own calibration had no rows for, from calibrations that had."""
    flash2 = load_software("scaling-2023b").efficiency.flash2
    return with_efficiency(software, softmax_bytes=softmax_bytes, flash2=flash2)


PROGRAMS = {
    "megatron-2021": _with_kernels(MEGATRON, SCALING.efficiency.softmax_bytes),
    "softmax counted": _with_kernels(MEGATRON, COUNTED_SOFTMAX_BYTES),
    "softmax as if fused": _with_kernels(MEGATRON, FUSED_SOFTMAX_BYTES),
    "16 bytes a parameter": replace(_with_kernels(MEGATRON, SCALING.efficiency.softmax_bytes), weight_state_bytes=4.0),
    "scaling-2023a": _with_kernels(SCALING, SCALING.efficiency.softmax_bytes),
}
"""Unfused softmax and flash attention come from the two programs that were calibrated on runs with them (llama-13b).
As if fused: what is left of a gain if the unfused kernel were as fast. 16 bytes of state for each parameter: gradients
in half precision; otherwise 18."""
PROGRAM, COUNTED, FUSED, SMALL, OTHER = PROGRAMS


def program_of(case: Case, name: str) -> Software:
    """A program; LLaMA trains without dropout."""
    return replace(PROGRAMS[name], dropout=case.shape.family == "gpt2")


@dataclass(frozen=True)
class Setting:
    """What one configuration of a case chooses.

    Attributes:
        attention: the requested kernel.
        recompute: of all layers.
        micro_batch: sequences.
    """

    attention: Attention
    recompute: Recompute
    micro_batch: int


def settings() -> Iterator[Setting]:
    """Every configuration of a case."""
    for attention, recompute, micro_batch in product(ATTENTION, RECOMPUTE, MICROBATCHES):
        yield Setting(attention, recompute, micro_batch)


def points() -> list[tuple[Case, str, Setting]]:
    """Every configuration of every case, with the programs that predict it."""
    programs = {case: tuple(PROGRAMS) if case in (GPT_96B, LLAMA_65B) else (PROGRAM, COUNTED) for case in CASES}
    return [(case, program, setting) for case in CASES for program in programs[case] for setting in settings()]
