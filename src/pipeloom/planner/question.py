"""The planner's input: model, cluster, batch, and limits of the search."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from pipeloom.cost.flops import shape_model_flops
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError
from pipeloom.families import FAMILIES, ends_forwards_first, installed
from pipeloom.planner.bounds import Bounds
from pipeloom.planner.left_out import LeftOut, Part
from pipeloom.planner.stages import Stages
from pipeloom.predict.describe import dtype_problem
from pipeloom.terminal.words import count, did_you_mean, or_list
from pipeloom.workload.adapter import Adapter
from pipeloom.workload.axes import IN_SENTENCES, Axes, divisors
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.dtypes import Precision, Products, dtype_of
from pipeloom.workload.launchers import PIPELOOM, WITH_EXPERTS, Launcher
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.limits import Headroom, limits_of
from pipeloom.workload.model import Balance, ModelShape
from pipeloom.workload.run import Attention, Run
from pipeloom.workload.update import Update


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Values to search. ``None``: all that model, batch and program allow.

    Attributes:
        tp, cp, pp, dp: sizes of the axes.
        ep: data ranks that share the experts of a layer.
        ep_overlap: whether tokens travel to them beside the compute of the other half of a micro-batch.
        loops: stages of each pipeline rank.
        micro_batch: sequences of a micro-batch.
        families: schedule families.
        shards: sharding levels of data parallelism.
        recompute: activation recomputation; ``none`` with ``full`` also allows some of the layers.
        sequence_parallel: whether to use sequence parallelism.
        strategies: names of ``planner/strategies``; ``none`` is a layout without any, which is also the answer if the
            others lead to no layout.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    ep_overlap: tuple[bool, ...] | None = None
    loops: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    families: tuple[str, ...] | None = None
    shards: tuple[Shard, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    strategies: tuple[str, ...] | None = None

    def allows(self, **values: Any) -> bool:
        """Whether all of the values are within the limits."""
        return all((among := getattr(self, name)) is None or value in among for name, value in values.items())

    @cached_property
    def names(self) -> list[str]:
        """Names of the limits that are set."""
        return [item.name for item in fields(self) if getattr(self, item.name) is not None]


ONE_STAGE = Limits(pp=(1,), loops=(1,), strategies=("none",))
"""Layouts without a pipeline whose model is a single stage."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Question:
    """A model to train, a cluster, and sizes; ``make_question`` makes one from names of the catalog.

    Examples:
        >>> from pipeloom import make_question
        >>> question = make_question("gpt-6.6b", "dgx-a100", num_devices=16, global_batch=64, seq=1024)
        >>> question.limited(pp=(4, 8))
        Question(gpt-6.6b on 16 devices of dgx-a100, 64 sequences of 1,024 tokens in bfloat16, limits: pp)

    Attributes:
        shape: the model.
        cluster: the cluster.
        software: the training program.
        num_devices: world size; a layout uses all devices.
        global_batch: global batch size in sequences.
        seq: sequence length in tokens.
        precision: of weights and activations in matrix products.
        products: of the operands of linear layers; ``None``: ``precision``.
        attention: the attention kernel.
        fused_norm: whether norms are one kernel.
        headroom: fraction of the memory of every device that layouts leave free.
        order_tries: for the strategy ``order``, changes of an order to try for each layout; ``None``: only if limits
            name the strategy, ``ORDER_TRIES``.
        limits: of the search.
        has_default_dtype: whether the precision is the default of the devices.
        launcher: the program that can start every layout; pipeloom starts those of any training program.
        adapter: low-rank adapters of all layers, whose other weights are frozen; ``None``: all weights are trained.
        balance: what keeps the loads of experts equal (``ModelConfig.balance``); ``None``: as each layout allows.
        expert_load: of the fullest rank where ranks share experts (``Run.expert_load``).
        boundary: the code of messages between stages; ``None``: they travel as they are.
        by_document: whether attention ends at the borders of documents.
        update: when weights are updated, and of which gradient the norm is limited.
        left_out: what does not work with other settings of the run.
        stages: cache of the stages of layouts, for changed questions, too.
    """

    shape: ModelShape
    cluster: Cluster
    software: Software
    num_devices: int
    global_batch: int
    seq: int
    precision: Precision = "bf16"
    products: Products | None = None
    attention: Attention = "flash2"
    fused_norm: bool = True
    headroom: float = 0.0
    order_tries: int | None = None
    limits: Limits = field(default_factory=Limits)
    has_default_dtype: bool = False
    launcher: Launcher = PIPELOOM
    adapter: Adapter | None = None
    balance: Balance | None = None
    expert_load: float = 1.0
    boundary: Boundary | None = None
    by_document: bool = False
    update: Update = field(default_factory=Update)
    left_out: LeftOut = field(default_factory=LeftOut)
    stages: dict[Placed, Stages] = field(default_factory=dict[Placed, Stages], compare=False)

    def __repr__(self) -> str:
        """Model, cluster and sizes."""
        batch = f"{count(self.global_batch, 'sequence')} of {count(self.seq, 'token')} in {dtype_of(self.precision)}"
        limits = f", limits: {', '.join(self.limits.names)}" if self.limits.names else ""
        where = f"{count(self.num_devices, 'device')} of {self.cluster.name}"
        return f"Question({self.shape.name or 'a model'} on {where}, {batch}{limits})"

    @cached_property
    def bounds(self) -> dict[tuple[Run, Cluster, bool], Bounds]:
        """Cache of the bounds of its layouts by (run, cluster, whether backwards are split)."""
        return {}

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: everything that is wrong.
        """
        problems = self._problems()
        if problems:
            raise ConfigError(problems, "the question")

    def _problems(self) -> list[str]:
        sizes = {"devices": self.num_devices, "the global batch": self.global_batch, "seq": self.seq}
        found = [f"{name} must be at least 1, found {value}" for name, value in sizes.items() if value < 1]
        found += [f"{name} must be at most {MOST:,}, found {value}" for name, value in sizes.items() if value > MOST]
        if (refusal := _HEADROOM.refusal(self.headroom)) is not None:
            found.append(f"headroom {refusal}")
        lack = self.cluster.lack(self.num_devices)
        if lack is not None:
            found.append(lack)
        elif not self.clusters:
            device = self.cluster.device
            problem = dtype_problem(dtype_of(self.precision), device.name, device.peak_flops_per_s)
            found.append(
                f"the dtype {problem}" if problem else f"{device.name} has no peak for products in {self.products}"
            )
        return (
            found
            + self._model_problems()
            + self._order_problems()
            + self._update_problems()
            + self._left_out_problems()
            + limit_problems(self.limits, self.software, self.launcher, has_adapters=self.adapter is not None)
        )

    def _model_problems(self) -> list[str]:
        """What the program or the axes do not have for the model, its adapters and its messages."""
        found: list[str] = []
        if self.adapter is not None and not self.software.has_lanes:
            found.append(f"adapter.rank needs the training program pipeloom, found {self.software.name}")
        if self.shape.experts is not None and not self.software.takes_experts:
            found.append(
                f"model.experts needs the training program {or_list(WITH_EXPERTS)}, found {self.software.name}"
            )
        if self.shape.experts is None and set(self.limits.ep or ()) - {1}:
            found.append("ep shares the experts of a layer, and the model has none; leave it out")
        if self.shape.experts is None and True in (self.limits.ep_overlap or ()):
            found.append("ep_overlap is of tokens that travel to experts, and the model has none; leave it out")
        if self.shape.blocks is not None and not self.software.has_lanes:
            found.append(f"model.density needs the training program pipeloom, found {self.software.name}")
        if self.shape.blocks is not None and self._takes_matrices:
            found.append("model.density does not work with adapters, nor with optimizers that update whole matrices")
        if self.boundary is not None and not self.software.has_lanes:
            found.append(f"layout.boundary needs the training program pipeloom, found {self.software.name}")
        return found

    def _order_problems(self) -> list[str]:
        """What is wrong with the search of orders."""
        if self.order_tries is None:
            return []
        if self.order_tries < 1:
            return [f"the changes of an order must be at least 1, found {self.order_tries}"]
        if ORDER not in self.software.strategies:
            return [f"{self.software.name} runs orders of its own, so none can be searched for it"]
        return [] if self.limits.allows(strategies=ORDER) else [f"an order is searched only if strategies name {ORDER}"]

    def _update_problems(self) -> list[str]:
        """What updates of stages within the step do not work with."""
        found, name, limits = list[str](), "optimizer.update stage", self.limits
        if self.update.within_step and not self.software.has_lanes:
            found.append(f"{name} needs the training program pipeloom, found {self.software.name}")
        if self.update.needs_whole_stages and set(limits.tp or ()) - {1} | set(limits.shards or ()) - {"none"}:
            found.append(f"{name} with optimizer.clip stage needs tp 1 and shards none, for whole gradients")
        return found

    def _left_out_problems(self) -> list[str]:
        """Limits that name what other settings of the run leave out."""
        limits = self.limits
        named: dict[Part, bool] = {
            "strategy swap": "swap" in (limits.strategies or ()),
            "strategy slices": "slices" in (limits.strategies or ()),
            "ep above 1": bool(set(limits.ep or ()) - {1}),
            "halves in turns": True in (limits.ep_overlap or ()),
        }
        words = "the backwards of {} do not wait for model.balance batch; leave the balance or the family out"
        refused = [words.format(name) for name in limits.families or () if name in self.unbalanced_families]
        return [*self.left_out.problems(part for part, is_named in named.items() if is_named), *refused]

    @cached_property
    def families(self) -> tuple[str, ...]:
        """Families to search; one whose orders are found by a search of their own only if limits name it."""
        offered = (name for name in installed(self.software.families) if not FAMILIES[name].is_found)
        return self.limits.families or tuple(name for name in offered if name not in self.unbalanced_families)

    @cached_property
    def unbalanced_families(self) -> frozenset[str]:
        """Families that are left out, since a backward precedes a forward and a balance loss needs the whole batch."""
        if self.shape.experts is None or self._balance != "batch":
            return frozenset()
        each = installed(self.software.families)
        return frozenset(one for one in each if not (FAMILIES[one].is_found or ends_forwards_first(one)))

    @property
    def may_count_batch(self) -> bool:
        """Whether a balance of experts over the whole batch is stated, or that of runs which divide micro-batches."""
        return self.shape.experts is not None and self._balance in (None, "batch")

    @cached_property
    def families_of_parts(self) -> tuple[str, ...]:
        """Families for runs that divide micro-batches, so that nothing has the loads of one in one place."""
        return tuple(name for name in self.families if ends_forwards_first(name) or not self.may_count_batch)

    @cached_property
    def undivided(self) -> list[str]:
        """What needs more than a tensor-parallel rank's part of a matrix, a sentence each."""
        rule = self.software.optimizer
        needs = {
            "the optimizer updates whole matrices": rule is not None and rule.matrices is not None,
            "the density is of whole matrices": self.shape.blocks is not None,
            "the optimizer clips whole stages": self.update.needs_whole_stages,
        }
        return [sentence for sentence, is_there in needs.items() if is_there]

    @property
    def _takes_matrices(self) -> bool:
        """Whether adapters or the optimizer belong to whole matrices."""
        rule = self.software.optimizer
        return self.adapter is not None or (rule is not None and rule.matrices is not None)

    @property
    def _counts_microbatches(self) -> bool:
        """Whether a loss or a capacity counts the loads of experts in whole micro-batches, so a rank must have them."""
        experts = self.shape.experts
        return experts is not None and (self._balance == "microbatch" or experts.capacity is not None)

    @property
    def _balance(self) -> Balance | None:
        """That of a planned run: for other programs, whose orders no balance restricts, it is of micro-batches."""
        return "microbatch" if self.balance in (None, "batch") and not self.launcher.is_own else self.balance

    def splits(self, pp: int) -> list[bool]:
        """Whether to search split backwards, whole ones or both: on one rank a split one is never faster."""
        kinds = {FAMILIES[name].splits_backward for name in self.families}
        return sorted(kinds if pp > 1 or len(kinds) == 1 else {False})

    def axis_problems(self, run: Run) -> list[str]:
        """Why the program does not run the model on the axes of a run, a sentence each."""
        window = self.shape.window
        has_window, has_experts = window is not None and window < self.seq, self.shape.experts is not None
        return self.launcher.axis_problems(run, has_experts=has_experts, has_window=has_window)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Sharding levels to search, the least first."""
        among = self.limits.shards or self.software.shards or LEVELS
        if self.update.needs_whole_stages:
            among = ("none",)
        return tuple(level for level in LEVELS if level in among)

    @cached_property
    def strategies(self) -> tuple[str, ...]:
        """Strategies to try."""
        left_out = () if self.searches_orders else (ORDER,)
        left_out = (*left_out, "slices") if self._counts_microbatches else left_out
        # It recomputes whole micro-batches.
        left_out = left_out if "full" in self.recompute else (*left_out, "keep")
        left_out = (*left_out, *(name for name in self.software.strategies if self.left_out.why(f"strategy {name}")))
        return tuple(n for n in self.software.strategies if n not in left_out and self.limits.allows(strategies=n))

    @property
    def searches_orders(self) -> bool:
        """Whether orders are searched, which takes seconds for each layout: only on request."""
        return self.order_tries is not None or ORDER in (self.limits.strategies or ())

    @cached_property
    def recompute(self) -> tuple[Recompute, ...]:
        """Kinds of recomputation to search; selective by default only if the attention kernel stores the scores."""
        keeps_scores = self.attention in ("plain", "fused-softmax")
        usual: tuple[Recompute, ...] = ("none", "selective", "full") if keeps_scores else ("none", "full")
        runs = self.launcher.recomputations
        return self.limits.recompute or tuple(kind for kind in usual if not runs or kind in runs)

    def may_divide(self, *axes: str) -> bool:
        """Whether a layout may have several ranks along one of these axes, such as ``pp``."""
        sizes = [self.context_sizes if axis == "cp" else getattr(self.limits, axis) for axis in axes]
        return self.num_devices > 1 and any(among is None or max(among, default=1) > 1 for among in sizes)

    @cached_property
    def context_sizes(self) -> tuple[int, ...]:
        """Sizes of the context axis to search: powers of two with which a rank has ``LEAST_CONTEXT`` tokens.

        For pipeloom only those of the limits: its attention over parts of sequences has no fused kernel on GPUs.
        """
        if self.limits.cp is not None:
            return self.limits.cp
        if self._counts_microbatches:
            return (1,)
        most = self.seq // LEAST_CONTEXT if self.launcher.has_context and not self.launcher.is_own else 1
        return tuple(2**power for power in range(max(1, most).bit_length()))

    @property
    def with_context_axis(self) -> "Question | None":
        """The question with context axes searched, where they are only on request; ``None`` elsewhere."""
        sizes = tuple(2**power for power in range(1, 7) if self.num_devices % 2**power == 0)
        is_possible = sizes and self.launcher.has_context and not self._counts_microbatches
        return self.limited(cp=sizes) if is_possible and self.limits.cp is None else None

    @cached_property
    def expert_sizes(self) -> tuple[int, ...]:
        """Numbers of data ranks that share the experts of a layer to search: those that divide the experts."""
        experts = self.shape.experts
        sizes = (1,) if experts is None else tuple(divisors(experts.count))
        sizes = (1,) if self.left_out.why("ep above 1") else sizes
        return tuple(size for size in sizes if self.limits.allows(ep=size))

    def expert_runs(self, run: Run) -> list[Run]:
        """A run for each number of ranks that share experts, and for each whether halves of a micro-batch hide it."""
        shared = [run.changed(ep=size) for size in self.expert_sizes if run.data_ranks % size == 0]
        both = [one.changed(ep_overlap=True) for one in shared if one.ep > 1 and run.micro_batch > 1 and self._halves]
        return [one for one in [*shared, *both] if self.limits.allows(ep_overlap=one.ep_overlap)]

    @cached_property
    def _halves(self) -> bool:
        """Whether the program computes halves of a micro-batch, and no run counts or masks whole ones."""
        others = self._counts_microbatches or self.by_document or self.left_out.why("halves in turns")
        return self.software.has_lanes and bool(self.families_of_parts) and not others

    @cached_property
    def clusters(self) -> tuple[Cluster, ...]:
        """The cluster in every distinct order of its kinds of nodes whose devices all support the precision."""
        found: dict[tuple[str, ...], Cluster] = {}
        for order in self.cluster.orders():
            cluster = self.cluster.reordered(order)
            kinds = [kind for kind, _ in cluster.kinds(max(1, self.num_devices))]
            if all({self.precision, self.run.peak_precision} <= set(kind.device.peak_flops_per_s) for kind in kinds):
                found.setdefault(tuple(kind.name for kind in kinds), cluster)
        return tuple(found.values())

    def limited(self, **limits: Any) -> "Question":
        """The question with some of its limits changed."""
        return replace(self, limits=replace(self.limits, **limits))

    @cached_property
    def least_s(self) -> float:
        """Lower bound of the step time in seconds for any layout: model FLOPs at the peak of the devices."""
        flops = (
            self.global_batch * self.seq * shape_model_flops(self.shape, self.seq, self.run.frozen_pieces, self.adapter)
        )
        return flops / max(one.peak_flops_per_s(self.num_devices, self.run.peak_precision) for one in self.clusters)

    @property
    def run(self) -> Run:
        """The run on one device, before a layout is chosen."""
        return Run(
            shape=self.shape,
            seq=self.seq,
            global_batch=self.global_batch,
            attention=self.attention,
            fused_norm=self.fused_norm,
            precision=self.precision,
            products=self.products,
            frozen_pieces=0 if self.adapter is None else 1,  # the embedding
            adapter=self.adapter,
            boundary=self.boundary,
            expert_load=self.expert_load,
            by_document=self.by_document,
            updates_stages=self.update.within_step,
        )


HEADROOM = 0.08
"""Default headroom of plans: the mean error of predicted memory (docs/accuracy.md, all rows with measured memory). It
also has to cover what a run may need later: an allocator that fragments, buffers of the network."""
(_HEADROOM,) = limits_of(Headroom)
ORDER = "order"
"""The strategy that is used only on request."""
ORDER_TRIES = 500
"""Changes of an order that are tried for each layout if the strategy is named without a number."""
LEAST_CONTEXT = 4096
"""Tokens of a sequence on each rank of a context axis, at least, unless limits name its sizes. With few, the scores of
a rank take less time than the exchange of its keys and values, since they shrink by the square. Published recipes have
4,096 (NeMo, 8,192 tokens over 2 ranks) or more (arXiv 2407.21783, section 3.3.2: 131,072 over 16)."""
MOST = 10**9
"""Largest number of devices, sequences of a batch and tokens of a sequence."""
LEVELS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
"""Every sharding level, the least first."""


def layout_limits(run: Run, family: str) -> dict[str, Any]:
    """Limits that allow only the axes and family of one layout, with any sharding and recomputation."""
    names = (*IN_SENTENCES, "ep", "ep_overlap", "loops", "micro_batch", "sequence_parallel")
    return {name: (getattr(run, name),) for name in names} | {"families": (family,)}


def why_not(question: Question, sizes: Axes) -> str | None:
    """Why axes do not divide the model or the batch; ``None`` if they do."""
    shape, (tp, cp, dp, pp) = question.shape, sizes
    if tp > 1 and (wholes := question.undivided):
        return f"{wholes[0]}, which tp divides"
    if shape.heads % tp:
        return "the number of heads is not a multiple of tp"
    if shape.kv_heads % tp:
        return "the number of key-value heads is not a multiple of tp"
    if tp > 1 and question.seq % tp:
        return "the tokens of a sequence are not a multiple of tp"
    if problems := question.axis_problems(replace(question.run, **sizes._asdict(), sequence_parallel=tp > 1)):
        return problems[0]
    if cp > 1 and question.seq % (2 * cp * tp):
        return "the tokens of a sequence are not a multiple of 2 x cp x tp"
    if pp > question.software.num_pieces(shape.layers):
        return "the pipeline has more ranks than there are layers"
    if pp > 1 and shape.tied and not question.launcher.ties_stages:
        return f"{question.launcher.title} shares no matrix between two stages"
    if question.global_batch % dp:
        return "the batch is not a multiple of dp"
    return None


def limit_problems(
    limits: Limits, software: Software, launcher: Launcher = PIPELOOM, *, has_adapters: bool = False
) -> list[str]:
    """A sentence for each limit that the training program does not have."""
    runs, title = launcher.recomputations, software.name + (" with adapters" if has_adapters else "")
    if not launcher.is_own:
        title = f"{launcher.title} (priced as {software.name})"
    own = [
        f"{launcher.title} has no recomputation '{name}'; it has {', '.join(runs)}"
        for name in limits.recompute or ()
        if runs and name not in runs
    ]
    if not launcher.has_context and set(limits.cp or ()) - {1}:
        own.append(f"{launcher.title} has no context parallelism; leave cp out, or name another program")
    if limits.recompute is not None and "full" not in limits.recompute and "keep" in (limits.strategies or ()):
        kinds = ", ".join(limits.recompute)
        own.append(
            f"strategy keep recomputes whole micro-batches, found recompute {kinds}; add full, or leave keep out"
        )
    return own + [
        f"{title} has no {what} '{name}'; {_hint(name, has)}it has {', '.join(has)}"
        for what, wanted, has in (
            ("family", limits.families, installed(software.families)),
            ("sharding level", limits.shards, software.shards or LEVELS),
            ("strategy", limits.strategies, ("none", *software.strategies)),
        )
        for name in wanted or ()
        if name not in has
    ]


def _hint(name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
    return f"{hint} " if hint else ""
