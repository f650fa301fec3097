"""The configuration of a whole run, and the recipe of its schedule."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

from pipeloom.calls import checked_class
from pipeloom.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    MachineConfig,
    OptimizerConfig,
    OutputConfig,
    RestartConfig,
    ScheduleConfig,
    TrainingConfig,
)
from pipeloom.families import AUTO, FAMILIES, Choice
from pipeloom.passes import Moves
from pipeloom.recipe import Knobs, Recipe, run_recipe, shared_state
from pipeloom.schedule import read_schedule
from pipeloom.workload.adapter import Adapter
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import ModelConfig


@checked_class
@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig:
    """The configuration of a run: the sections of a run file. ``load_run`` makes it from a file or from settings.

    Examples:
        >>> from pipeloom import load_run
        >>> load_run(layout={"pp": 2, "loops": 3}, training={"steps": 20})
        RunConfig(layout.pp=2, layout.loops=3, training.steps=20)
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """Sizes and architecture."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and sequence length."""
    layout: Layout = field(default_factory=Layout)
    """Sizes of the parallel axes, and how the batch is divided."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Order of the work on each pipeline rank, and memory that moves."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Update rule and learning rate."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """Low-rank adapters of frozen weights."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The training loop."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When checkpoints are written, and from which one a run resumes."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    """What happens when a process fails."""
    output: OutputConfig = field(default_factory=OutputConfig)
    """The run folder."""
    machine: MachineConfig = field(default_factory=MachineConfig)
    """The cluster of predictions and plans; train runs on this machine."""

    def __repr__(self) -> str:
        """The settings that differ from their defaults."""
        own = {
            f"{section.name}.{item.name}": getattr(getattr(self, section.name), item.name)
            for section in fields(RunConfig)
            for item in fields(getattr(self, section.name))
        }
        default = RunConfig()
        changed = (f"{name}={value!r}" for name, value in own.items() if value != value_of(default, name))
        return f"RunConfig({', '.join(changed)})"

    @property
    def family(self) -> str:
        """Family of the run's schedule: ``schedule.family``, or ``automatic_family``."""
        named = self.schedule.family
        return self.automatic_family if named == AUTO else named

    @property
    def automatic_family(self) -> str:
        """The family that ``auto`` stands for; depends on other settings only.

        With a pipeline, breadth-first. Without one all orders take the same compute, and depth-first holds least: a
        micro-batch goes back right after its forward. There, too, breadth-first is used where each visit of a stage
        takes a transfer, since it visits a stage once for all micro-batches, and where a balance loss of experts needs
        the loads of the whole batch before its backwards.
        """
        is_needed = self.layout.has_pipeline or self.model.needs_whole_batch or self._visits_cost()
        return "breadth-first" if is_needed else "depth-first"

    def _visits_cost(self) -> bool:
        """Whether a rank without a pipeline gathers, reduces or swaps in a stage at each visit."""
        layout, buffers = self.layout, self.schedule.gradient_buffers
        if layout.num_loops < 2:
            return False
        reduces = layout.shard in ("gradients", "full") and buffers is not None and buffers < layout.num_loops
        gathers = layout.shard == "full" and layout.num_microbatches > 1
        return self.schedule.device_budget is not None or (layout.data_ranks > 1 and (gathers or reduces))

    @property
    def resolved_model(self) -> ModelConfig:
        """The model with every derived size. The tokenizer's file is read only for a vocabulary that is not set.

        Raises:
            UserError: that file cannot be read.
        """
        # The file may be gone after a checkpoint has its tokenizer.
        return self.model.resolve(self.model.vocab_size or self.data.vocab_size)

    @property
    def pairs(self) -> Adapter | None:
        """The adapters of the model; ``None`` for none."""
        own = self.adapter
        if own.rank is None:
            return None
        return Adapter(
            rank=own.rank,
            alpha=8.0 if own.alpha is None else own.alpha,
            targets=own.targets or ("q", "v"),
            first_layer=self.training.freeze_layers or 0,
            draws_second=own.init == "random",
        )

    @property
    def frozen_pieces(self) -> int:
        """Pieces from the first on (embedding, layers) that train nothing."""
        number = self.training.freeze_layers
        if self.adapter.rank is not None:
            return (number or 0) + 1  # the embedding has no adapter
        return 0 if number is None else number + 1

    def with_known_loops(self) -> Self:
        """The same run with a number for ``layout.loops`` where its family takes only one and none is chosen."""
        family = FAMILIES.get(self.family)
        only = None if family is None else family.only_loops
        if only is None or self.layout.loops not in (None, AUTO):
            return self
        return replace(self, layout=replace(self.layout, loops=only))

    def with_most_microbatches(self) -> Self:
        """The same run with the number of micro-batches of the replica with most, where replicas have their own.

        What memory, descriptions and predictions take from one replica is then that of the largest.
        """
        return replace(self, layout=self.layout.with_most_microbatches())

    def of_replica(self, replica: int) -> Self:
        """The same run with the schedule of a replica."""
        return replace(self, layout=self.layout.of_replica(replica))

    def under(self, layout: Layout) -> Self:
        """The same run under another layout, without settings that have no effect there.

        Nothing is divided again where replicas have as many micro-batches, or gathered where no state is sharded, and
        one rank has none to spare.
        """
        every = None if layout.has_equal_replicas else self.training.divide_every
        schedule, restart = self.schedule, self.restart
        if layout.num_ranks == 1:
            restart = replace(restart, layout="same")
        if layout.shard == "none":
            schedule = replace(schedule, residency=None, prefetch=None, gradient_buffers=None)
        training = replace(self.training, divide_every=every)
        return replace(self, layout=layout, schedule=schedule, training=training, restart=restart)

    def divided(self, numbers: tuple[int, ...]) -> Self:
        """The same run with a number of micro-batches for each replica."""
        return replace(self, layout=self.layout.divided(numbers))

    def with_loops(self, loops: int, family: str) -> Self:
        """The same run with a number of stages on each rank, in a family."""
        return replace(self, layout=replace(self.layout, loops=loops), schedule=replace(self.schedule, family=family))

    def with_loops_of(self, earlier: "RunConfig") -> Self:
        """The same run as an earlier one chose number and family, where it had as many ranks and no other family."""
        family = earlier.schedule.family
        is_alike = earlier.layout.pp == self.layout.pp and self.schedule.family in (AUTO, family)
        return self.with_loops(earlier.layout.num_loops, family) if is_alike else self

    @property
    def saves_between_steps(self) -> bool:
        """Whether checkpoints are planned before the last step."""
        return self.checkpoint.every is not None or self.checkpoint.every_s > 0

    @property
    def swaps_stages(self) -> bool:
        """Whether a device budget swaps whole stages; otherwise there is none, or it swaps experts alone."""
        return self.schedule.device_budget is not None and not self.layout.has_own_experts

    @property
    def least_gradients(self) -> float:
        """Least share of a rank's gradients that exist at the same time.

        Of stages that are updated within the step at least one has a gradient, and the largest is at least the mean.
        """
        return 1 / self.layout.num_loops if self.optimizer.known_update.within_step else 1.0

    @property
    def title(self) -> str:
        """Name of the schedule in titles: the family, or the name of the file."""
        file = self.schedule.file
        return self.family if file is None else file.name

    def choice(self) -> Choice:
        """Family and sizes of the run's schedule."""
        return Choice(
            family=self.family,
            pp=self.layout.pp,
            num_microbatches=self.layout.num_microbatches,
            loops=self.layout.num_loops,
            group_size=self.schedule.group_size,
            placement=self.schedule.placement,
            num_slices=self.layout.num_slices,
            keep=self.schedule.keep,
            frozen_stages=self.layout.frozen_stages(self.frozen_pieces),
        )

    def knobs(self) -> Knobs:
        """The run's choices for its schedule.

        Raises:
            UserError: ``schedule.file`` cannot be read.
        """
        settings = self.schedule
        return Knobs(
            choice=self.choice(),
            receive_buffers=settings.receive_buffers,
            residency=settings.known_residency,
            prefetch=settings.known_prefetch,
            gradient_buffers=settings.gradient_buffers,
            device_budget=settings.budget_bytes,
            needs_norm=self.optimizer.known_update.needs_norm,
            given=None if settings.file is None else read_schedule(settings.file),
            moves=Moves(balance=settings.balance, offload=settings.offload, budget_bytes=settings.activation_bytes),
            keeps_as=self.training.device,
        )

    def recipe(self) -> Recipe:
        """The recipe of the schedule that the run trains with.

        Raises:
            UserError: ``schedule.file`` cannot be read.
        """
        shard = shared_state(
            self.layout.shard, data_ranks=self.layout.reducing_ranks, sequence_parallel=self.layout.sequence_parallel
        )
        # With adapters the matrix is frozen, as everything else.
        is_trained = self.adapter.rank is None
        return run_recipe(
            self.knobs(),
            shard=shard,
            lends_tied=self.model.tied,
            trains_tied=is_trained,
            swaps_part=self.layout.has_own_experts,
            updates_stages=self.optimizer.known_update.within_step,
        )


def run_part(options: RunConfig) -> RunConfig:
    """The ``RunConfig`` in a command's options, which are a subclass with more fields."""
    return RunConfig(**{item.name: getattr(options, item.name) for item in fields(RunConfig)})


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a setting, such as ``layout.pp``."""
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as nested dictionaries for TOML; fields that are ``None`` are left out."""
    tree: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            tree[item.name] = to_dict(value)
        elif isinstance(value, tuple) and any(is_dataclass(one) for one in value):
            tree[item.name] = [to_dict(one) for one in value]
        elif value is not None:
            tree[item.name] = str(value) if isinstance(value, Path) else value
    return tree
