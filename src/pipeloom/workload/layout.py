"""The layout: axis sizes of a run, how its batch is cut, and the position of each rank. No process groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import Literal, NamedTuple

from pipeloom.terminal.words import count
from pipeloom.workload.axes import WithAxes
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.limits import Common, Count

Shard = Literal["none", "optimizer", "gradients", "full"]
Recompute = Literal["none", "selective", "full"]
StrategyName = Literal["keep", "balance", "offload", "swap", "slices", "order"]
"""Strategies of the planner: recompute what exceeds memory (keep), evict activations to partners (balance), offload
them to the host, swap whole stages, slice sequences, search an order of compute actions."""


def even_slices(num_tokens: int, number: int, multiple: int = 1) -> tuple[int, ...]:
    """Lengths of slices, as even as possible, larger ones first.

    Args:
        num_tokens: of a whole sequence, a multiple of ``multiple``.
        number: of slices.
        multiple: divides every length, such as the number of tensor-parallel ranks.
    """
    units = num_tokens // multiple
    # Rounded up, so that the first slices are the longer ones: they attend to the fewest earlier tokens.
    bounds = [-(-units * i // number) for i in range(number + 1)]
    return tuple((end - begin) * multiple for begin, end in pairwise(bounds))


def frozen_counts(sizes: Sequence[int], frozen: int) -> tuple[int, ...]:
    """For each stage the number of its pieces that are not trained.

    Args:
        sizes: number of pieces of each stage.
        frozen: pieces from the first on that are not trained.
    """
    begins = accumulate(sizes, initial=0)
    return tuple(min(size, max(0, frozen - begin)) for size, begin in zip(sizes, begins, strict=False))


def frozen_stages(sizes: Sequence[int], frozen: int) -> int:
    """Number of stages from the first on that train nothing; the arguments are those of ``frozen_counts``."""
    return sum(end <= frozen for end in accumulate(sizes)) if frozen else 0


class Coordinates(NamedTuple):
    """Position of a rank on the axes of the layout, each counted from 0.

    Attributes:
        pipeline: on the pipeline axis.
        data: among the ranks with the same weights: those of a replica's context axis are neighbors.
        tensor: on the tensor axis.
    """

    pipeline: int
    data: int
    tensor: int


def place_of(pipeline: int, order: tuple[int, ...] | None) -> int:
    """Position of a pipeline rank on the pipeline axis, counted from 0.

    Args:
        pipeline: the rank.
        order: see ``Layout.pipeline_order``.
    """
    return order.index(pipeline) if order else pipeline


def paired_order(partners: Sequence[int]) -> tuple[int, ...]:
    """An order of pipeline ranks in which partners are neighbors, so that they share a node if a node has several.

    Args:
        partners: for each pipeline rank its partner, or itself (``Schedule.partners``).
    """
    return tuple(dict.fromkeys(one for rank, partner in enumerate(partners) for one in (rank, partner)))


@dataclass(frozen=True, kw_only=True)
class Layout(WithAxes):
    """Sizes of the parallel axes, and how the batch is divided.

    Ranks are numbered with the tensor axis innermost, then context, data and pipeline, as Megatron-LM does
    (arXiv 2104.04473, section 4): the ranks that talk most are neighbors and share a node, and two pipeline neighbors
    are ``dp * cp * tp`` ranks apart, unless ``pipeline_order`` differs. With hybrid sharding the ranks of one shard
    group are neighbors on the data axis.
    """

    pp: Common[int] = 4
    """Pipeline-model-parallel size: pipeline ranks."""
    loops: Common[int | Literal["auto"] | None] = None
    """Virtual stages on each pipeline rank. More loops make the bubble smaller: on a looped placement it is
    (pp - 1) / (num_microbatches * loops) of the ideal time. auto: train chooses a number, and
    the family if that is auto, by predicted steps that it measures before the first one. None: 2 or 1; the only
    number that schedule.family takes, such as 1 for 1f1b, otherwise 2."""
    num_microbatches: Common[int] = 8
    """Micro-batches of a step, per replica. With fewer than pp, ranks are idle while the pipeline fills and drains;
    a little above pp hides the transfers between ranks."""
    microbatches: tuple[int, ...] | Literal["auto"] | None = None
    """Micro-batches of a step of each replica, where replicas are not equally fast, such as 5 2 5 4 with dp 4: slow
    ones get fewer. Every token counts alike. auto: train measures before the first step and divides dp *
    num_microbatches so that the slowest replica ends as early as possible. None: num_microbatches for all."""
    microbatch_size: Common[Count] = 2
    """Micro-batch size, in sequences."""
    token_slices: int | tuple[int, ...] | Literal["auto"] | None = None
    """Slices of each micro-batch along its tokens, which pass through the pipeline one after the other (TeraPipe). A
    number makes slices of even length, several numbers are lengths, and auto chooses lengths from measured times. The
    bubble is (pp - 1) / (num_microbatches * slices * loops) where slices are equally fast, and num_microbatches *
    slices of at least pp keep all ranks busy. None: whole sequences."""
    partition: tuple[int, ...] | None = None
    """Pieces of each stage, in order: embedding, layers, head. The partition of a file does not hold where flags set
    another number of stages. None: the pipeline rank with most FLOPs has as few as possible; with another
    machine.software than pipeloom, as that program does."""
    tp: Common[Count] = 1
    """Tensor-model-parallel size."""
    cp: Count = 1
    """Context-parallel size: ranks that share the tokens of each sequence. Keys and values go around these ranks, and
    each has a part of the first and of the last tokens, so that all compute equally many scores."""
    dp: Common[Count] = 1
    """Data-parallel size. Each replica of the pipeline has micro-batches of its own."""
    ep: Count = 1
    """Expert-parallel size: neighboring ranks of the data axis that share the experts of each layer. Each of them has
    1 / ep of the experts, and tokens travel to the ranks of theirs and back. It divides dp * cp."""
    ep_overlap: bool = False
    """With ep: each stage computes the halves of a micro-batch in turns, so that tokens of one half travel to experts
    and back while the other is computed. Needs a microbatch_size of at least 2."""
    replicate: Count | None = None
    """Hybrid sharding: copies of the sharded state, each sharded over dp / replicate ranks (times cp). None: one copy,
    sharded over all of them."""
    shard: Common[Shard] = "none"
    """State sharded over data-parallel ranks (ZeRO). optimizer: the optimizer's state (ZeRO-1). gradients: also the
    gradients (ZeRO-2). full: also the weights (ZeRO-3, FSDP). The ranks of the context axis share it, too."""
    sequence_parallel: Common[bool] = False
    """Megatron's sequence parallelism, over tp ranks."""
    recompute: Common[Recompute] = "none"
    """Activation recomputation in the backward. selective: the core of attention. full: whole layers."""
    recompute_layers: tuple[Recompute, ...] | None = None
    """Activation recomputation of each layer, in order. None: recompute for all layers."""

    average_every: int | tuple[int, ...] | None = None
    """Updates that each replica does alone, without a reduction of gradients, until weights are averaged (DiLoCo). A
    step of the run is then so many updates of every replica and an average; training.steps and all else count such
    steps. With several numbers, such as 9 3 9 9 with dp 4, slow replicas do fewer. None: gradients are reduced in every
    step."""
    boundary: Boundary | None = None
    """How activations and their gradients travel between pipeline ranks in training steps. int8: rounded to 8 bits,
    with a scale for each 128 numbers; about a quarter of the bytes of float32, for networks that limit the step. None:
    as they are, in training.dtype."""
    pipeline_order: tuple[int, ...] | None = None
    """Pipeline ranks in the order of the devices. With 0 7 1 6 2 5 3 4, partners that exchange activations share a
    node. None: ascending."""

    @property
    def num_loops(self) -> int:
        """``loops``, or the default of families that take any number; 1 for auto before it is decided."""
        if isinstance(self.loops, int):
            return self.loops
        return 2 if self.loops is None else 1

    @property
    def is_automatic(self) -> bool:
        """Whether ``train`` chooses the number of stages on each rank by measured steps, and has not yet."""
        return self.loops == "auto"

    def automatic_loops(self, num_pieces: int) -> tuple[int, ...]:
        """Numbers that ``auto`` compares: powers of two up to 8 for which a model has enough pieces."""
        return tuple(number for number in (1, 2, 4, 8) if self.pp * number <= num_pieces)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.num_loops

    @property
    def has_pipeline(self) -> bool:
        """Whether stages are on several ranks; sizes below 1 are not judged."""
        return self.pp != 1

    @property
    def num_ranks(self) -> int:
        """Processes of the run, one for each device."""
        return self.num_devices

    @property
    def num_slices(self) -> int:
        """Token slices of a micro-batch; 1 for whole sequences, and for auto before it is decided."""
        if isinstance(self.token_slices, tuple):
            return max(1, len(self.token_slices))
        return max(1, self.token_slices) if isinstance(self.token_slices, int) else 1

    @property
    def cuts_sequences(self) -> bool:
        """Whether micro-batches are cut into token slices, with auto as well."""
        return self.token_slices not in (None, 1)

    def slice_lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each slice of sequences of this length, on one rank; all in one for auto before it is decided."""
        if isinstance(self.token_slices, tuple):
            return self.token_slices
        return even_slices(num_tokens // self.cp, self.num_slices, self.tp)

    @property
    def divides_batch(self) -> bool:
        """Whether ``train`` chooses the micro-batches of each replica by measured times, and has not yet."""
        return self.microbatches == "auto"

    @property
    def own_microbatches(self) -> tuple[int, ...] | None:
        """``microbatches``, if they are given or chosen; ``None`` where all replicas have as many."""
        return self.microbatches if isinstance(self.microbatches, tuple) else None

    @property
    def microbatches_by_replica(self) -> tuple[int, ...]:
        """Micro-batches of a step of each replica; the same for all for auto before they are chosen."""
        return self.own_microbatches or (self.num_microbatches,) * self.dp

    @property
    def microbatch_words(self) -> str:
        """The same in words, such as ``5, 2, 5 and 4 micro-batches``."""
        if self.divides_batch:
            return f"{count(self.num_microbatches * self.dp, 'micro-batch')} (which train divides among replicas)"
        if self.own_microbatches is None:
            return count(self.num_microbatches, "micro-batch")
        *first, last = map(str, self.own_microbatches)
        return f"{', '.join(first)} and {last} micro-batches"

    def with_most_microbatches(self, old: "Layout | None" = None) -> "Layout":
        """With ``num_microbatches`` of the replica with most, in place of the default or of an old layout's."""
        own, old = self.own_microbatches, old or Layout()
        is_old = self.num_microbatches == old.num_microbatches and own != old.own_microbatches
        return replace(self, num_microbatches=max(own)) if own and is_old else self

    def of_replica(self, replica: int) -> "Layout":
        """The layout of the schedule of a replica: with its number of micro-batches for all."""
        if self.microbatches is None:
            return self
        return replace(self, num_microbatches=self.microbatches_by_replica[replica], microbatches=None)

    def divided(self, numbers: tuple[int, ...]) -> "Layout":
        """The layout with a number of micro-batches for each replica."""
        return replace(self, num_microbatches=max(numbers), microbatches=numbers)

    @property
    def batch_size(self) -> int:
        """Sequences of a step, over all replicas; with ``average_every`` of one update of each."""
        return sum(self.microbatches_by_replica) * self.microbatch_size

    @property
    def updates_by_replica(self) -> tuple[int, ...]:
        """Updates of each replica in a step."""
        own = self.average_every
        return own if isinstance(own, tuple) else (own or 1,) * self.dp

    @property
    def step_size(self) -> int:
        """Sequences of a step, with all updates of all replicas."""
        if self.average_every is None:
            return self.batch_size
        return sum(self.updates_by_replica) * self.num_microbatches * self.microbatch_size

    @property
    def step_words(self) -> str:
        """Behind the micro-batches of a replica what all of them read in a step, in words; empty for one replica."""
        if self.dp == 1:
            return ""
        update = "" if self.average_every is None else "each update of "
        is_alike = self.own_microbatches is None and not self.divides_batch
        each = f" for {update}each of {self.dp} replicas" if is_alike else ""
        return f"{each}: {count(self.step_size, 'sequence')}"

    def windows_of_updates(self, replica: int) -> list[slice]:
        """For each update of a replica in a step its part of the step's sequences, behind those of earlier replicas."""
        size, counts = self.num_microbatches * self.microbatch_size, self.updates_by_replica
        first = sum(counts[:replica])
        return [slice(update * size, (update + 1) * size) for update in range(first, first + counts[replica])]

    @property
    def most_updates(self) -> int:
        """Updates in a step of the replica with most. Times of a step are those of one of them."""
        return max(self.updates_by_replica)

    @property
    def update_size(self) -> float:
        """Sequences of all replicas in the time of one of these updates."""
        return self.step_size / self.most_updates

    @property
    def reducing_ranks(self) -> int:
        """Ranks that hold the same weights, and reduce their gradients."""
        return self.data_ranks if self.average_every is None else self.cp

    @property
    def has_equal_replicas(self) -> bool:
        """Whether all replicas do equally much in a step."""
        return self.microbatches is None and not isinstance(self.average_every, tuple)

    def replica_ranks(self) -> list[list[int]]:
        """For each replica all of its ranks."""
        every = [self.coordinates(rank) for rank in range(self.num_ranks)]
        return [
            [rank for rank, place in enumerate(every) if self.replica_of(place) == replica]
            for replica in range(self.dp)
        ]

    @property
    def other_axes(self) -> str:
        """What the other axes add to the pipeline, in words; nothing without them."""
        tensor = f", each by {self.tp} tensor-parallel ranks" if self.tp > 1 else ""
        tensor += " (sequence too)" if self.sequence_parallel else ""
        tensor += f"; each sequence by {self.cp} context-parallel ranks" if self.cp > 1 else ""
        tensor += f"; experts over {self.ep} ranks" if self.ep > 1 else ""
        if self.data_ranks == 1:
            return tensor
        if self.average_every is not None:
            numbers = self.updates_by_replica if isinstance(self.average_every, tuple) else (self.average_every,)
            return (
                f"{tensor}; {count(self.dp, 'replica')}, an average after {' '.join(map(str, numbers))} updates of each"
            )
        copies = f", {self.replicate} copies" if self.replicate is not None else ""
        return f"{tensor}; {count(self.dp, 'replica')}, shard {self.shard}{copies}"

    def recompute_by_layer(self, num_layers: int) -> tuple[Recompute, ...]:
        """For each layer of the model what is recomputed."""
        return self.recompute_layers or (self.recompute,) * num_layers

    def coordinates(self, rank: int) -> Coordinates:
        """Position of a rank, 0..num_ranks-1."""
        others, tensor = divmod(rank, self.tp)
        place, data = divmod(others, self.data_ranks)
        return Coordinates(self.pipeline_order[place] if self.pipeline_order else place, data, tensor)

    def replica_of(self, place: Coordinates) -> int:
        """The replica of a position: ranks of a context axis are of one."""
        return place.data // self.cp

    def words_of(self, place: Coordinates) -> str:
        """Places on the data, context and tensor axis in words; of an axis of one rank nothing."""
        found = [f"replica {self.replica_of(place)}"] if self.dp > 1 else []
        found += [f"context rank {place.data % self.cp}"] if self.cp > 1 else []
        return ", ".join([*found, *([f"tensor rank {place.tensor}"] if self.tp > 1 else [])])

    def rank_at(self, place: Coordinates) -> int:
        """The rank at a position."""
        # The order of the axes as Megatron-LM has it (see the class).
        place_of_stages = place_of(place.pipeline, self.pipeline_order)
        return (place_of_stages * self.data_ranks + place.data) * self.tp + place.tensor

    def with_fewer_replicas(self, num_ranks: int) -> Iterator["Layout"]:
        """The same pipeline and batch with the most replicas that so many ranks hold, and with fewer of them.

        As many ranks as before share a copy of the state where they divide the replicas, else all of them.
        """
        for replicas in range(min(self.dp - 1, num_ranks * self.dp // self.num_ranks), 0, -1):
            each, rest = divmod(sum(self.microbatches_by_replica), replicas)
            copies, others = divmod(replicas, self.dp // (self.replicate or 1))
            if rest == 0:
                # A divisor of both: what divided the experts still does.
                ep = gcd(self.ep, replicas * self.cp)
                overlaps, shard = self.ep_overlap and ep > 1, self.shard if replicas * self.cp > 1 else "none"
                fewer = replace(self, dp=replicas, ep=ep, ep_overlap=overlaps, num_microbatches=each, microbatches=None)
                yield replace(fewer, shard=shard, replicate=copies if copies > 1 and not others else None)

    def of_forwards(self) -> "Layout":
        """The same stages, or those to be chosen, on the ranks of one replica: forwards only, of whole sequences."""
        return Layout(
            pp=self.pp,
            loops=self.loops if self.is_automatic else self.num_loops,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            partition=self.partition,
            pipeline_order=self.pipeline_order,
            num_microbatches=1,
            microbatch_size=1,
        )

    def frozen_stages(self, frozen: int) -> int:
        """Number of stages from the first on that train nothing, of which ``frozen`` pieces are not trained.

        0 while the partition is not known.
        """
        return frozen_stages(self.partition or (), frozen)

    @property
    def shard_size(self) -> int:
        """Data-parallel ranks that share one copy of a stage; 1 without sharding."""
        return 1 if self.shard == "none" else self.data_ranks // (self.replicate or 1)

    def pipelines(self) -> list[list[int]]:
        """For each place on the other axes, the ranks of that pipeline in order."""
        return [
            [self.rank_at(Coordinates(pipeline, data, tensor)) for pipeline in range(self.pp)]
            for data in range(self.data_ranks)
            for tensor in range(self.tp)
        ]

    def replicas(self) -> list[list[int]]:
        """For each replica the ranks of its first pipeline, in order."""
        return self.pipelines()[:: self.cp * self.tp]

    def part_of(self, place: Coordinates) -> tuple[int, int]:
        """Which part of a micro-batch's computation a position has: on the context and the tensor axis."""
        return place.data % self.cp, place.tensor

    @property
    def num_computing_groups(self) -> int:
        """Number of groups of ranks that compute stages on their own."""
        return self.pp * self.dp

    def computing_groups(self) -> list[list[list[int]]]:
        """For each replica, by pipeline rank, the ranks that compute a stage together, in the order of their parts."""
        ranks = range(self.cp * self.tp)
        return [
            [
                [self.rank_at(Coordinates(stage, replica * self.cp + one // self.tp, one % self.tp)) for one in ranks]
                for stage in range(self.pp)
            ]
            for replica in range(self.dp)
        ]

    def shard_groups(self) -> list[list[int]]:
        """All groups of ranks that share one copy of the same stages, each in the order of the shards."""
        size = self.shard_size
        begins = range(0, self.data_ranks, size)
        return [ranks[begin : begin + size] for ranks in self.data_groups() for begin in begins]

    def copy_groups(self) -> list[list[int]]:
        """All groups of ranks that hold the same shard of the same stages."""
        size = self.shard_size
        return [ranks[first::size] for ranks in self.data_groups() for first in range(size)]

    @property
    def shares_experts(self) -> bool:
        """Whether ranks share the experts of a layer, or sizes are wrong, which is reported elsewhere."""
        return self.ep != 1

    @property
    def has_halves(self) -> bool:
        """Whether a micro-batch has sequences for two halves."""
        return self.microbatch_size > 1

    @property
    def expert_shard(self) -> Shard:
        """``shard`` of the experts: nothing where no other rank has the same ones."""
        return "none" if self.data_ranks == self.ep else self.shard

    @property
    def has_own_experts(self) -> bool:
        """Whether ranks share experts, and no other rank holds those of a rank, so that they alone may be swapped."""
        return self.ep > 1 and self.data_ranks == self.ep

    def expert_groups(self) -> list[list[int]]:
        """All groups of ranks that share the experts of the same stages, in the order of their parts."""
        begins = range(0, self.data_ranks, self.ep)
        return [ranks[begin : begin + self.ep] for ranks in self.data_groups() for begin in begins]

    def same_expert_groups(self) -> list[list[int]]:
        """All groups of ranks that hold the same experts of the same stages."""
        return [ranks[first :: self.ep] for ranks in self.data_groups() for first in range(self.ep)]

    def tensor_groups(self) -> list[list[int]]:
        """All groups of ranks that share the matrices of the same stages of the same replica."""
        return [list(range(first, first + self.tp)) for first in range(0, self.num_ranks, self.tp)]

    def context_groups(self) -> list[list[int]]:
        """All groups of ranks that share the tokens of the same sequences, in the order of their parts."""
        begins = range(0, self.data_ranks, self.cp)
        return [ranks[begin : begin + self.cp] for ranks in self.data_groups() for begin in begins]

    def lockstep_groups(self) -> list[list[int]]:
        """All groups of ranks that compute the same stages at the same time, and exchange within them."""
        size = self.tp * lcm(self.cp, self.ep)
        return [list(range(first, first + size)) for first in range(0, self.num_ranks, size)]

    def data_groups(self) -> list[list[int]]:
        """For each place on the pipeline and tensor axes, the ranks with the same weights and other tokens."""
        return [
            [self.rank_at(Coordinates(pipeline, data, tensor)) for data in range(self.data_ranks)]
            for pipeline in range(self.pp)
            for tensor in range(self.tp)
        ]


ONE_RANK = Layout(pp=1, loops=1, num_microbatches=1, microbatch_size=1)
"""One stage, and a batch of one sequence."""
TWO_PIPELINES = Layout(pp=2, dp=2, loops=1, num_microbatches=1, microbatch_size=1)
"""The same on two replicas of two pipeline ranks."""
TWO_SHARING = Layout(pp=1, dp=2, ep=2, loops=1, num_microbatches=1, microbatch_size=1)
"""The same on two replicas that share the experts of each layer."""
TWO_LOOPS = replace(ONE_RANK, loops=2)
"""Two stages on one rank."""
TWO_SLICES = replace(ONE_RANK, token_slices=2)
"""Sequences that are cut."""
NO_HALVES, TWO_HALVES = (replace(TWO_SHARING, microbatch_size=2, ep_overlap=value) for value in (False, True))
"""Experts that ranks share; halves of each micro-batch are computed in turns, or not."""
