"""What a cost model has to know about a run: the transformer's shape and how it is laid out."""

from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.config import ModelConfig
from pipeloom.workload.dtypes import Precision
from pipeloom.workload.layout import Recompute, Shard

Mlp = Literal["gelu", "swiglu"]
Attention = Literal["plain", "fused-softmax", "flash1", "flash2"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer language model.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        heads: attention heads; their total width is ``hidden``.
        kv_heads: key and value heads; fewer than ``heads`` is grouped-query attention.
        ffn: inner width of the feed-forward block.
        mlp: ``gelu`` has two matrices, ``swiglu`` three.
        vocab: rows of the embedding; 0 for layers alone, without embedding and head.
        tied: whether the embedding and the head are one matrix.
        name: for people.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    mlp: Mlp
    vocab: int
    tied: bool
    name: str = ""

    @property
    def kv_width(self) -> int:
        """Total width of the keys; the values have the same."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices: four of attention, two or three of the feed-forward block."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.mlp == "swiglu" else 2) * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; of the head as well, where it has its own."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters without norms and biases, which are below 0.1 %."""
        return self.layers * self.layer_matrix_parameters + (1 if self.tied else 2) * self.embedding_parameters


def shape_of(model: ModelConfig) -> ModelShape:
    """The cost model's view of a model as it is trained.

    Args:
        model: resolved.
    """
    assert model.num_kv_heads is not None
    assert model.ffn_size is not None
    assert model.vocab_size is not None
    return ModelShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        ffn=model.ffn_size,
        mlp="swiglu" if model.family == "llama" else "gelu",
        vocab=model.vocab_size,
        tied=model.tied,
        name=model.preset or (str(model.file) if model.file else model.family),
    )


def model_of(shape: ModelShape, model: ModelConfig) -> ModelConfig:
    """A model's settings with the sizes of a shape; the inverse of ``shape_of``."""
    return replace(
        model,
        family="llama" if shape.mlp == "swiglu" else "gpt2",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
        vocab_size=shape.vocab,
        tied=shape.tied,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training step that somebody might run: model, layout, kernels.

    Attributes:
        shape: the model.
        seq: tokens of a sequence.
        dp: data-parallel replicas.
        tp: ranks that share each matrix.
        pp: pipeline ranks.
        loops: stages of each pipeline rank.
        shard: what data parallelism shards: nothing, optimizer state (ZeRO-1), also gradients (2), everything (3).
        micro_batch: sequences of a micro-batch.
        global_batch: sequences of a step.
        recompute: nothing, the core of attention, or whole layers in the backward.
        sequence_parallel: whether what tensor parallelism leaves whole is split over the sequence.
        attention: the kernel.
        fused_norm: whether the norm is one kernel.
        precision: of weights and activations.
        replicate: copies of the sharded state; each is sharded over ``dp / replicate`` ranks.
        layers_by_stage: layers of each stage; ``None`` as the program divides them.
        recompute_layers: what each layer recomputes; ``None`` where ``recompute`` says it for all.
        placement: stage -> pipeline rank, a key of ``PLACEMENTS``; which layers a balanced partition gives to a stage
            depends on it.
        pipeline_order: pipeline ranks in the order in which they stand on the devices; ``None`` for ascending.
        slices: tokens of each slice that sequences are cut into; empty for whole ones.
    """

    shape: ModelShape
    seq: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    loops: int = 1
    shard: Shard = "none"
    micro_batch: int = 1
    global_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    attention: Attention = "flash2"
    fused_norm: bool = True
    precision: Precision = "bf16"
    replicate: int = 1
    layers_by_stage: tuple[int, ...] | None = None
    recompute_layers: tuple[Recompute, ...] | None = None
    placement: str = "looped"
    pipeline_order: tuple[int, ...] | None = None
    slices: tuple[int, ...] = ()

    @property
    def slice_shares(self) -> tuple[float, ...]:
        """Each slice's share of a sequence; one for whole ones."""
        return tuple(length / self.seq for length in self.slices) or (1.0,)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each replica and step; a partial one counts whole."""
        return max(1, -(-self.global_batch // (self.dp * self.micro_batch)))

    @property
    def num_devices(self) -> int:
        """Devices of the run."""
        return self.dp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.loops

    @property
    def shard_size(self) -> int:
        """Ranks that one copy of what is sharded is shared out to."""
        return self.dp // self.replicate

    @property
    def recompute_kinds(self) -> tuple[Recompute, ...]:
        """What is recomputed, in one layer after the other or at once for all."""
        return self.recompute_layers or (self.recompute,)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.seq

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or a weight."""
        return BYTES[self.precision]

    @property
    def effective_attention(self) -> Attention:
        """The kernel that really runs.

        Megatron's fused scale, mask and softmax needs 16 < seq <= 2048 (16384 in later versions), a multiple of
        four, and (micro-batch x heads of a rank) a multiple of four; otherwise the plain one runs (Megatron-LM,
        ``fused_softmax.py``).
        """
        if self.attention != "fused-softmax":
            return self.attention
        batch_heads = self.micro_batch * (self.shape.heads // self.tp)
        fits = 16 < self.seq <= 16384 and self.seq % 4 == 0 and batch_heads % 4 == 0
        return "fused-softmax" if fits else "plain"
