"""What other programs run: rules by which the exports refuse a run, and within which the planner searches.

Names and rules are those of Megatron-LM with Megatron Core 0.16 and of torchtitan 0.3.0.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.terminal.words import and_list, count, or_list
from pipeloom.workload.dtypes import dtype_of
from pipeloom.workload.layout import Layout, Recompute
from pipeloom.workload.model import ModelConfig, RopeScaling
from pipeloom.workload.model_families import MODELS
from pipeloom.workload.run import Run
from pipeloom.workload.update import Update

LauncherName = Literal["pipeloom", "megatron", "torchtitan"]
Grouping = Callable[[int, int, int], list[str]]
AxisRule = Callable[[Layout | Run, bool, bool], list[str]]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that can start a planned run.

    Attributes:
        name: on the command line.
        title: in sentences.
        software: of the catalog, with its calibrated efficiencies.
        model_families: keys of ``MODELS``; empty for all.
        precisions: data types of weights and activations; empty for all.
        families: of pipelines, with one stage on each rank and with several; empty for all.
        recomputations: kinds of recomputation; empty for all.
        placements: of several stages on each rank; empty for all.
        names_stages: whether it is started with any layers in each stage, whatever those of its measured runs. The
            programs that pipeloom starts have rules of their own.
        recomputes_some: whether the same number of first layers of every stage can be recomputed, and no others.
        is_own: whether it is this program, which runs everything.
        ties_stages: whether the first and the last stage can share a matrix.
        has_whole_theta: whether the base of rotary positions is a whole number.
        takes_attention: whether a run chooses the attention kernel.
        has_windows: whether it is started with sliding windows.
        has_experts: whether it is started with experts.
        axes: why it does not run experts and windows on so many ranks of some axes.
        products: operands of linear layers other than weights and activations.
        has_context: whether it runs context parallelism.
        groups: why it does not interleave so many micro-batches over so many ranks in groups of a size.
    """

    name: LauncherName
    title: str
    software: str
    model_families: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    families: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    recomputations: tuple[Recompute, ...] = ()
    placements: tuple[str, ...] = ()
    names_stages: bool = False
    recomputes_some: bool = True
    is_own: bool = False
    ties_stages: bool = True
    has_whole_theta: bool = False
    takes_attention: bool = False
    has_windows: bool = False
    has_experts: bool = False
    axes: AxisRule | None = None
    products: tuple[str, ...] = ()
    has_context: bool = True
    groups: Grouping | None = None

    def model_problems(self, model: ModelConfig, precision: str, seq: int, *, by_document: bool = False) -> list[str]:
        """Why it does not train a model, a sentence each.

        Args:
            model: resolved.
            precision: of weights and activations: fp32, bf16, fp16 or fp64.
            seq: sequence length in tokens.
            by_document: whether attention ends at the borders of documents.
        """
        if self.is_own:
            return []
        of_sizes = (*self._precision_problems(precision), *self._size_problems(model))
        return [*of_sizes, *self._part_problems(model, seq, by_document=by_document)]

    def _precision_problems(self, precision: str) -> Iterator[str]:
        if self.precisions and precision not in self.precisions:
            name = "float64" if precision == "fp64" else dtype_of(precision)
            yield f"training.dtype {name}: {self.title} trains in {or_list(self.precisions)}"

    def _size_problems(self, model: ModelConfig) -> Iterator[str]:
        if model.family not in self.model_families:
            known = and_list(self.model_families)
            yield f"model.family {model.family}: the export to {self.title} supports {known} only"
        if model.scaling is not None and replace(model.scaling, factor=_LLAMA3.factor) != _LLAMA3:
            yield (
                f"model.rope_scaling {model.rope_scaling}: the export to {self.title} supports that of Llama 3.1 only: "
                f"llama3 with model.rope_original_len {_LLAMA3.original_len} and its usual turns"
            )
        has_angles = MODELS[model.family].is_rotary
        if self.has_whole_theta and has_angles and not model.known_rope_theta.is_integer():
            yield f"model.rope_theta {model.rope_theta}: {self.title} takes a whole number"
        if self.has_experts and model.experts is not None:
            yield from _expert_problems(model, self.title)

    def _part_problems(self, model: ModelConfig, seq: int, *, by_document: bool) -> list[str]:
        """Settings of attention, logits, experts and density with which it is not started."""
        reasons = {
            "model.window": (not self.has_windows and model.has_window(seq), "sliding windows"),
            "model.query_pre_attn_scalar": (model.query_pre_attn_scalar is not None, "scores of its own"),
            "model.attn_softcap": (model.attn_softcap is not None, "scores of its own"),
            "model.logit_softcap": (model.logit_softcap is not None, "bounds of logits"),
            "model.experts": (not self.has_experts and model.experts is not None, "experts"),
            "model.share_layers": (model.share_layers is not None, "shared layers"),
            "model.density": (model.density is not None, "blocks of matrices"),
            "data.attention document": (by_document, "attention that ends at documents"),
        }
        return [
            f"{name}: {self.title} is not started with {what}; leave it out"
            for name, (is_set, what) in reasons.items()
            if is_set
        ]

    def product_problems(self, products: str | None) -> list[str]:
        """Why it does not run linear layers with such operands, a sentence each; ``None`` for the usual ones."""
        if products is None or products in self.products:
            return []
        if self.is_own:
            return [
                f"training.matmul_dtype: train does not run {products} products; leave it out, or plan for megatron"
            ]
        return [f"training.matmul_dtype: pipeloom does not start {self.title} with {products} products; leave it out"]

    def group_problems(self, ranks: int, microbatches: int, group_size: int) -> list[str]:
        """Why it does not run interleaved stages in groups of so many micro-batches, a sentence each."""
        return [] if self.groups is None else self.groups(ranks, microbatches, group_size)

    def axis_problems(self, axes: Layout | Run, *, has_experts: bool, has_window: bool) -> list[str]:
        """Why it does not run a model on such axes, a sentence each.

        Args:
            axes: of a layout.
            has_experts: whether layers have experts.
            has_window: whether a layer does not see all earlier tokens.
        """
        return [] if self.axes is None else self.axes(axes, has_experts, has_window)

    def has_family(self, family: str, ranks: int, stages: int) -> bool:
        """Whether it may run the order of a family with so many ranks and stages on each."""
        known = self.families[stages > 1]
        return ranks == 1 or not known or family in known

    def has_placement(self, placement: str) -> bool:
        """Whether it runs several stages on each rank in a placement."""
        return not self.placements or placement in self.placements

    def has_order(self, ranks: int, stages: int, microbatches: int) -> bool:
        """Whether a plan may have such stages.

        Groups of interleaved stages are whole: this program distributes the rest of a division, others do not.
        """
        if self.is_own or stages == 1:
            return True
        return ranks > 1 and microbatches % ranks == 0 and not self.group_problems(ranks, microbatches, ranks)


def optimizer_problems(program: str, optimizer: str) -> list[str]:
    """That a program is started with AdamW alone, for another update rule."""
    found = f"optimizer.name {optimizer}: the export to {program} supports adamw only; use adamw"
    return [] if optimizer == "adamw" else [found]


def update_problems(update: Update) -> list[str]:
    """That other programs clip and update the whole model after its last backward."""
    found = list[str]()
    if update.clip == "stage":
        found.append("optimizer.clip stage: the program clips by the norm of the whole gradient; leave it out")
    if update.within_step:
        found.append("optimizer.update stage: the program updates weights behind the pipeline; leave it out")
    return found


def _expert_problems(model: ModelConfig, program: str) -> Iterator[str]:
    """Experts that Megatron-LM does not have."""
    if model.expert_layout is not None and model.expert_layout.per_token == 1:
        yield f"model.experts_per_token 1: {program} does not divide the score of a single expert by itself; use 2"
    if model.known_balance == "bias":
        yield f"model.balance bias: {program} has biases with sigmoid scores only; use batch, microbatch or none"


def first_layers_recomputed(kinds_by_stage: Sequence[Sequence[Recompute]]) -> int | None:
    """The number of first layers that every stage fully recomputes; ``None`` if the run recomputes others.

    Args:
        kinds_by_stage: recomputation of each layer of each stage.
    """
    if not {kind for stage in kinds_by_stage for kind in stage} <= {"none", "full"}:
        return None
    number = max(list(stage).count("full") for stage in kinds_by_stage)
    is_first = all(list(stage) == _first(number, len(stage)) for stage in kinds_by_stage)
    return number if is_first else None


def with_first_layers(kinds_by_stage: Sequence[Sequence[Recompute]]) -> list[list[Recompute]]:
    """At least these layers recomputed, as the same number of first layers of every stage."""
    number = max(list(stage).count("full") for stage in kinds_by_stage)
    return [_first(number, len(stage)) for stage in kinds_by_stage]


def _first(number: int, size: int) -> list[Recompute]:
    return ["full" if layer < number else "none" for layer in range(size)]


def _megatron_groups(ranks: int, microbatches: int, group_size: int) -> list[str]:
    """Why Megatron-LM would refuse a group size, by its two rules."""
    found: list[str] = []
    if microbatches < ranks:
        found.append(
            f"layout.num_microbatches {microbatches} is below layout.pp {ranks}, but Megatron-LM's interleaved "
            "schedule needs groups of at least layout.pp"
        )
    left = microbatches % group_size
    if 0 < left < ranks <= microbatches:
        found.append(
            f"layout.num_microbatches {microbatches} in groups of {group_size} leaves {left}, but Megatron-LM's "
            f"last group needs at least layout.pp {ranks}; use a multiple of {group_size}, or schedule.family hybrid "
            f"with another group_size than {count(group_size, 'micro-batch')}"
        )
    return found


def _megatron_axes(axes: Layout | Run, has_experts: bool, has_window: bool) -> list[str]:
    """Why Megatron-LM would refuse a model's experts or windows on such axes."""
    found: list[str] = []
    if axes.cp > 1 and has_window:
        found.append("model.window with layout.cp above 1: Transformer Engine's ring attention has no windows")
    if axes.tp > 1 and has_experts and not axes.sequence_parallel:
        found.append("model.experts with layout.tp above 1: Megatron-LM needs layout.sequence_parallel")
    return found


_LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, original_len=8192, slow_turns=1.0, fast_turns=4.0, attention_factor=1.0
)
"""Rotary positions of Llama 3.1, which other programs have as a switch with a factor."""
PIPELOOM = Launcher(name="pipeloom", title="pipeloom", software="pipeloom", is_own=True, takes_attention=True)
MEGATRON = Launcher(
    name="megatron",
    title="Megatron-LM",
    software="megatron-core",
    model_families=("llama", "qwen2", "qwen3", "gpt2"),
    precisions=("fp32", "bf16", "fp16"),
    families=(("1f1b",), ("breadth-first", "depth-first", "hybrid")),
    placements=("looped",),
    names_stages=True,
    recomputations=("none", "selective", "full"),
    has_whole_theta=True,
    has_windows=True,
    has_experts=True,
    axes=_megatron_axes,
    products=("fp8",),
    groups=_megatron_groups,
)
TORCHTITAN = Launcher(
    name="torchtitan",
    title="torchtitan",
    software="fsdp",
    model_families=("llama", "qwen3"),
    precisions=("fp32", "bf16"),
    recomputations=("none", "full"),
    names_stages=True,
    recomputes_some=False,
    ties_stages=False,
)
LAUNCHERS: dict[LauncherName, Launcher] = {one.name: one for one in (PIPELOOM, MEGATRON, TORCHTITAN)}
"""Programs that can start a planned run, by name."""

WITH_EXPERTS = tuple(one.software for one in LAUNCHERS.values() if one.is_own or one.has_experts)
"""Programs of the catalog that train layers with experts."""
