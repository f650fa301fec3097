"""A training step as the cost model, the planner and the simulator take it: model, batch, layout, kernels."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pipeloom.workload.adapter import Adapter
from pipeloom.workload.axes import WithAxes
from pipeloom.workload.boundary import Boundary, boundary_bytes
from pipeloom.workload.dtypes import Precision, Products
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.model import ModelShape

Attention = Literal["plain", "fused-softmax", "flash1", "flash2"]

LayerKind = tuple[Recompute, int | None, bool]
"""What a layer recomputes, its window (``None`` if it sees all earlier tokens), and whether it has experts."""

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number."""


@dataclass(frozen=True, kw_only=True)
class Run(WithAxes):
    """One training step: model, batch, layout, kernels.

    Attributes:
        shape: the model.
        seq: tokens of a sequence.
        dp: data-parallel replicas.
        tp: ranks that share each matrix.
        cp: ranks that share the tokens of each sequence.
        pp: pipeline ranks.
        loops: stages of each pipeline rank.
        shard: what data parallelism shards: nothing, optimizer state (ZeRO-1), also gradients (2), everything (3).
        micro_batch: sequences of a micro-batch.
        global_batch: sequences of a step.
        recompute: nothing, the core of attention (``"selective"``), or whole layers (``"full"``).
        sequence_parallel: whether tensor-parallel ranks split the sequence outside of matrix products.
        attention: the kernel.
        fused_norm: whether the norm is one kernel.
        precision: of weights and activations.
        products: of the operands of linear layers, which are then cast; ``None``: ``precision``.
        replicate: copies of the sharded state; each is sharded over ``data_ranks / replicate`` ranks.
        ep: neighboring data ranks that share the experts of a layer, each with as many.
        ep_overlap: whether stages compute the halves of a micro-batch in turns, while tokens of the other travel.
        expert_load: pairs of a token and an expert on the rank with most / their mean, among ranks that share experts.
        segment: of the state, the parameters that are counted: all, or those that as many ranks hold.
        layers_by_stage: layers of each stage; ``None``: as the training program divides them.
        recompute_layers: for each layer its ``recompute``; ``None``: the same for all.
        placement: stage -> pipeline rank, a key of ``PLACEMENTS``; which layers a balanced partition gives to a stage
            depends on it.
        pipeline_order: pipeline ranks in the order of the devices; ``None`` for ascending.
        slices: tokens of each slice that sequences are cut into; empty for whole ones.
        by_document: whether attention ends at the borders of documents.
        frozen_pieces: pieces from the first on (embedding, layers) that train nothing.
        adapter: of the layers that train, whose other weights are frozen, as the head is; ``None``: they are trained.
        boundary: the code of messages between stages; ``None``: they travel as they are.
        microbatches: of each replica; ``None``: the same for all.
        updates: of each replica until weights are averaged, of which this is one of the replica with most; ``None``:
            gradients are reduced.
        delays_average: whether the average of weights runs beside the updates that follow it.
        updates_stages: whether each stage is updated within the step, when its gradient is complete, and that gradient
            takes no memory any more.
    """

    shape: ModelShape
    seq: int
    dp: int = 1
    tp: int = 1
    cp: int = 1
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
    products: Products | None = None
    replicate: int = 1
    ep: int = 1
    ep_overlap: bool = False
    expert_load: float = 1.0
    segment: Literal["all", "dense", "experts"] = "all"
    layers_by_stage: tuple[int, ...] | None = None
    recompute_layers: tuple[Recompute, ...] | None = None
    placement: str = "looped"
    pipeline_order: tuple[int, ...] | None = None
    slices: tuple[int, ...] = ()
    by_document: bool = False
    frozen_pieces: int = 0
    adapter: Adapter | None = None
    boundary: Boundary | None = None
    microbatches: tuple[int, ...] | None = None
    updates: tuple[int, ...] | None = None
    delays_average: bool = False
    updates_stages: bool = False

    def __hash__(self) -> int:
        """Hash of what the layouts of a search differ in, which is fast: runs are keys of caches."""
        axes = self.tp, self.cp, self.dp, self.pp, self.ep, self.loops
        recompute = self.recompute, self.recompute_layers, self.sequence_parallel
        return hash((*axes, *recompute, self.shard, self.replicate, self.micro_batch, self.layers_by_stage))

    def changed(self, **changes: Any) -> "Run":
        """``dataclasses.replace`` in a fraction of its time: a search makes hundreds of thousands of runs."""
        assert changes.keys() <= self.__dict__.keys(), "a run has no such field"
        other = object.__new__(Run)
        # A run caches nothing, so its fields are all that it has.
        other.__dict__.update(self.__dict__, **changes)
        return other

    @property
    def slice_shares(self) -> tuple[float, ...]:
        """Each slice's share of a sequence; one for whole ones."""
        return tuple(length / self.seq for length in self.slices) or (1.0,)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each replica and step, or of the one with most; a partial one counts whole."""
        if self.microbatches is not None:
            return max(self.microbatches)
        # Rounded up: tables of measurements have batches that their axes do not divide.
        return max(1, -(-self.global_batch // (self.dp * self.micro_batch)))

    @property
    def impossible(self) -> str | None:
        """Why no program can run these sizes; ``None`` if one may."""
        # Embedding and head may be stages of their own.
        if self.num_stages > self.shape.layers + 2:
            return "the model has fewer layers than the pipeline has stages"
        if self.global_batch < self.dp * self.micro_batch:
            return "the batch has fewer sequences than the replicas have in one micro-batch each"
        if self.shape.heads % self.tp or self.shape.heads % self.shape.kv_heads:
            return "tp and kv_heads do not divide the heads"
        return None

    @property
    def sizes(self) -> dict[str, Any]:
        """Name -> size of each axis, and of the groups of data ranks that share experts."""
        return {**self.axes._asdict(), "ep": self.ep}

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.loops

    @property
    def shard_size(self) -> int:
        """Data-parallel ranks that hold one copy of the sharded state."""
        return self.holders // self.replicate

    @property
    def holders(self) -> int:
        """Data-parallel ranks that hold the same parameters; of all of a stage, those that are not of experts."""
        return self.data_ranks // (self.ep if self.segment == "experts" else 1)

    @property
    def own_experts(self) -> int:
        """Experts of a layer that a rank has."""
        return 0 if self.shape.experts is None else self.shape.experts.count // self.ep

    @property
    def segments(self) -> tuple["Run", ...]:
        """The run for each part of the parameters of a rank that as many ranks hold; together they are all."""
        if self.ep == 1 or self.segment != "all":
            return (self,)
        return self.changed(segment="dense"), self.changed(segment="experts")

    @property
    def swapped(self) -> "Run":
        """The run for the part of the parameters that a device budget swaps: the experts of a rank, or all."""
        return self.segments[-1]

    @property
    def sharded(self) -> Shard:
        """What is sharded: ``shard``, but nothing where no other rank holds the same weights."""
        return self.shard if self.holders > 1 else "none"

    @property
    def reducing_ranks(self) -> int:
        """Ranks that hold the same weights, and reduce their gradients."""
        return self.data_ranks if self.updates is None else self.cp

    @property
    def share_of_updates(self) -> float:
        """Mean updates of the replicas / those of the replica with most."""
        return 1.0 if self.updates is None else sum(self.updates) / (len(self.updates) * max(self.updates))

    @property
    def num_shards(self) -> int:
        """Ranks that share the optimizer's state of a stage."""
        return 1 if self.sharded == "none" else self.shard_size

    @property
    def recompute_kinds(self) -> tuple[Recompute, ...]:
        """``recompute`` of each layer, or one value for all."""
        return self.recompute_layers or (self.recompute,)

    @property
    def layer_kinds(self) -> "tuple[LayerKind, ...]":
        """What each layer recomputes, its window, and whether it has experts."""
        recompute = self.recompute_layers or (self.recompute,) * self.shape.layers
        return tuple(zip(recompute, self.shape.windows, self.shape.with_experts, strict=True))

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers recompute and see the same, and all of them have experts or none."""
        return self.recompute_layers is None and self.shape.has_equal_layers

    def alike(self, kind: "LayerKind") -> "Run":
        """The run with all layers of one of its kinds."""
        recompute, window, experts = kind
        shape = self.shape.alike(window, experts=experts)
        return self.changed(recompute=recompute, recompute_layers=None, shape=shape)

    @property
    def with_lightest_layers(self) -> "tuple[Run, ...]":
        """The run with the window of some layers in all, for lower bounds; without and with experts if some have any.

        Which of the two layers takes less time depends on the device.
        """
        experts, shape = self.shape.experts, self.shape
        kinds = (experts is not None,) if experts is None or experts.every == 1 else (False, True)
        shapes = [shape.alike(shape.window, experts=one) for one in kinds]
        return tuple(self if one is shape else self.changed(shape=one) for one in shapes)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.rank_seq

    @property
    def sent_pairs(self) -> float:
        """Pairs of a token and an expert that a rank's tokens have in a layer, without those beyond a capacity."""
        return self._within_capacity(self.pairs)

    @property
    def computed_pairs(self) -> float:
        """Pairs that the experts of a rank compute in a layer: of the rank with most, where ranks share them.

        Loads of the experts of one rank are taken as equal.
        """
        return self._within_capacity(self.pairs * self.fullest_load)

    @property
    def fullest_load(self) -> float:
        """``expert_load``, or 1 where every rank has all experts."""
        return self.expert_load if self.ep > 1 else 1.0

    @property
    def pairs(self) -> float:
        """Pairs of a token and an expert of a micro-batch on one rank in a layer."""
        return 0.0 if self.shape.experts is None else self.tokens * self.shape.experts.per_token

    def _within_capacity(self, pairs: float) -> float:
        experts = self.shape.experts
        most = None if experts is None else experts.most_tokens(self.tokens)
        return pairs if experts is None or most is None else min(pairs, experts.count * most)

    @property
    def divides_microbatches(self) -> bool:
        """Whether slices, context ranks or lanes have parts of micro-batches, so that none has the loads of experts."""
        return bool(self.slices) or self.rank_seq < self.seq or self.ep_overlap

    @property
    def rank_seq(self) -> int:
        """Tokens of a sequence on one rank of the context axis; a part of a token counts whole."""
        return -(-self.seq // self.cp)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or a weight."""
        return BYTES[self.precision]

    def sent_numbers(self, *, scatters: bool = False) -> float:
        """Numbers of a message between two stages, on one device.

        Args:
            scatters: whether each tensor-parallel rank sends a share without sequence parallelism, too (Megatron's
                scatter/gather, arXiv 2104.04473, section 4.1).
        """
        is_cut = scatters or self.sequence_parallel
        return self.tokens * self.shape.hidden / (self.tp if is_cut else 1)

    def sent_bytes(self, *, scatters: bool = False) -> float:
        """Bytes of that message, as it travels."""
        return boundary_bytes(self.sent_numbers(scatters=scatters), self.element_bytes, self.boundary)

    @property
    def peak_precision(self) -> str:
        """The precision of most products, whose peak utilizations are fractions of."""
        return self.products or self.precision

    @property
    def effective_attention(self) -> Attention:
        """The attention kernel that runs.

        Megatron's fused scale, mask and softmax needs 16 < seq <= 2048 (16384 in later versions), a multiple of
        four, and (micro-batch x heads of a rank) a multiple of four; otherwise the plain one runs (Megatron-LM,
        ``fused_softmax.py``).
        """
        if self.attention != "fused-softmax":
            return self.attention
        batch_heads = self.micro_batch * (self.shape.heads // self.tp)
        fits = 16 < self.seq <= 16384 and self.seq % 4 == 0 and batch_heads % 4 == 0
        return "fused-softmax" if fits else "plain"

    @property
    def of_pieces(self) -> "Run":
        """The run with only the fields that affect the seconds of an embedding, a layer and a head."""
        return self.changed(**_BESIDES_PIECES)

    @property
    def of_state(self) -> "Run":
        """The run with only the fields that affect weights, gradients, optimizer state, and their collectives."""
        # Without layers of stages, what is recomputed may decide which layers a stage has.
        if self.layers_by_stage is None:
            return self
        return self.changed(
            micro_batch=1, global_batch=1, recompute="none", recompute_layers=None, sequence_parallel=False
        )

    @property
    def of_stages(self) -> "Run":
        """The run with a single micro-batch: how many there are changes neither seconds nor bytes of its stages."""
        return self.changed(global_batch=self.micro_batch * self.dp)

    @property
    def unsharded(self) -> "Run":
        """The run with the whole state on every rank."""
        return self.changed(shard="none", replicate=1)

    @property
    def of_measured_pieces(self) -> "Run":
        """Key of measured seconds: ``of_pieces`` without what no measurement varies.

        That is depth, name, kernels, mask, adapter.
        """
        # The seconds of a layer do not depend on depth, so models with equal layers share a measurement.
        shape = replace(self.shape, layers=1, tied=False, name="", sharing=None)
        if shape.window is not None and shape.window >= self.seq:
            shape = replace(shape, window=None, full_layers=())
        of_pieces = replace(self.of_pieces, shape=shape, adapter=None)
        return replace(of_pieces, attention="flash2", fused_norm=True, by_document=False)


_OF_PIECES = {
    "shape",
    "seq",
    "tp",
    "cp",
    "ep",
    "ep_overlap",
    "expert_load",
    "micro_batch",
    "recompute",
    "sequence_parallel",
    "attention",
    "fused_norm",
    "precision",
    "products",
    "by_document",
    "adapter",
}
"""Fields that affect the seconds of an embedding, a layer and a head."""
_BESIDES_PIECES = {field.name: field.default for field in fields(Run) if field.name not in _OF_PIECES}
"""The other fields, with their defaults."""
