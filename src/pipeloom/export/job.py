"""A run as those see it who start it: processes on nodes, layers in stages; and what a target makes of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeloom.config import ModelConfig, RunConfig, find_problems, run_part, unset
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.stages import stage_layers
from pipeloom.errors import ConfigError
from pipeloom.predict.describe import describe, with_dtype, with_model_sizes
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.terminal.words import count
from pipeloom.workload.dtypes import precision_of


@dataclass(frozen=True)
class Job:
    """A run and where its processes go.

    Attributes:
        config: without problems; the sizes of its model and its type are in place.
        model: resolved.
        schedule: compute actions only.
        layers_by_stage: layers of each stage; the first stage has the embedding as well.
        head_stage: the stage that has the head.
        cluster: whose nodes it runs on.
        time_limit: of one job, as Slurm takes it.
    """

    config: RunConfig
    model: ModelConfig
    schedule: Schedule
    layers_by_stage: tuple[int, ...]
    head_stage: int
    cluster: Cluster
    time_limit: str

    @property
    def order(self) -> tuple[tuple[Action, ...], ...]:
        """For each pipeline rank its forwards and backwards, without what is recomputed in between."""
        return tuple(tuple(action for action in row if action.kind is not Kind.RECOMPUTE) for row in self.schedule.rows)

    def needs(self, flags: dict[str, str]) -> tuple["Need", ...]:
        """What of the recipe the user has to set, for a program with these flags; nothing of what has no flag.

        Args:
            flags: flag by setting; ``-`` for one that the script uses otherwise.
        """
        missing = unset(self.config)
        return tuple(Need(variable(name), missing[name], flag) for name, flag in flags.items() if name in missing)

    @property
    def num_nodes(self) -> int:
        """Nodes that the run needs."""
        # Rounded up: the last node may be used in part.
        return -(-self.config.layout.num_ranks // self.cluster.devices_per_node)

    @property
    def processes_per_node(self) -> int:
        """Processes on each node, where all nodes have the same number."""
        return min(self.config.layout.num_ranks, self.cluster.devices_per_node)

    @property
    def dtype(self) -> str:
        """Type of weights and activations as other programs call it: fp32, bf16, fp16 or fp64."""
        return precision_of(self.config.training.known_dtype) or "fp64"

    @property
    def has_gpus(self) -> bool:
        """Whether the cluster's devices are GPUs."""
        return self.cluster.device.is_gpu

    def pieces_of(self, stage: int) -> tuple[bool, range, bool]:
        """What a stage holds: whether the embedding, which layers, whether the head."""
        begin = sum(self.layers_by_stage[:stage])
        return stage == 0, range(begin, begin + self.layers_by_stage[stage]), stage == self.head_stage

    def slice_problems(self) -> list[str]:
        """Why other programs cannot cut sequences as the run does; empty if it does not."""
        wanted = self.config.layout.token_slices
        if wanted is None or wanted == 1:
            return []
        return [f"layout.token_slices {wanted}: its schedules take whole sequences; leave it out"]

    def accumulation_problems(self, program: str) -> list[str]:
        """Why a program that accumulates gradients without a pipeline cannot keep the order of a run on one rank."""
        microbatches = [action.microbatch or 0 for action in self.order[0]]
        if len(self.order) > 1 or microbatches == sorted(microbatches):
            return []
        what = f"layout.pp 1 with schedule.family {self.config.schedule.family}: without a pipeline {program}"
        return [f"{what} runs each micro-batch forward and back before the next; use depth-first"]

    def order_problems(self, program: str) -> list[str]:
        """What only pipeloom does: recomputing some micro-batches, moving things away in between, an order of ranks."""
        schedule, given = self.config.schedule, self.config.recipe().given
        reasons = {
            "schedule.balance": (schedule.balance, "does not move what backwards need"),
            "schedule.offload": (schedule.offload, "does not move what backwards need"),
            "schedule.keep": (schedule.keep is not None, "cannot select micro-batches to recompute"),
            "schedule.device_budget": (schedule.device_budget is not None, "keeps all stages on the device"),
            "layout.pipeline_order": (
                self.config.layout.pipeline_order is not None,
                "numbers pipeline ranks in ascending order",
            ),
        }
        found = [f"{name}: {program} {why}; leave it out" for name, (is_set, why) in reasons.items() if is_set]
        if given is not None and not given.recipe:
            found.append(
                f"schedule.file: {program} starts with the schedule of a family, and {schedule.file} has no line "
                "recipe.family; `pipeloom schedule FILE --format torch-csv` prints its order for programs that read CSV"
            )
        return found

    def start_problems(self, program: str) -> list[str]:
        """Why a program that is started by one command on every node cannot have the run's stages and updates."""
        found, last = self.node_problems(), len(self.layers_by_stage) - 1
        if self.head_stage != last:
            found.append(
                f"machine.software {self.config.machine.software} puts the head into stage {self.head_stage}, and "
                f"leaves stage {last} empty; name a layout.partition"
            )
        name = self.config.optimizer.name
        return (
            found
            if name == "adamw"
            else [*found, f"optimizer.name {name}: {program} is started with adamw here; use that"]
        )

    def node_problems(self) -> list[str]:
        """Why one command cannot start the run on every node; empty if it can."""
        num_ranks, per_node = self.config.layout.num_ranks, self.cluster.devices_per_node
        lack = self.cluster.lack(num_ranks)
        if lack is not None:
            return [lack]
        sizes = {kind.name: kind.devices_per_node for kind, _ in self.cluster.kinds(num_ranks)}
        if len(set(sizes.values())) > 1:
            what = (
                f"nodes have different numbers of devices ({', '.join(f'{n} in {kind}' for kind, n in sizes.items())})"
            )
            way_out = f"describe the larger ones with devices_per_node {per_node}"
        elif num_ranks > per_node and num_ranks % per_node:
            what = f"{num_ranks} processes do not fill nodes of {per_node} devices ({self.cluster.name})"
            way_out = f"use a multiple of {per_node}, or fewer devices of a node"
        else:
            return []
        return [f"{what}, and one command for all nodes starts as many processes on each; {way_out}"]

    def checkpoints_left_out(self, program: str, otherwise: str) -> list[str]:
        """That another program writes no checkpoints by the clock; ``otherwise`` is what it has without an interval."""
        every, every_s = self.config.checkpoint.every, self.config.checkpoint.every_s
        rest = f"{otherwise}, as checkpoint.every is not set" if every is None else f"every {count(every, 'step')}"
        sentence = f"checkpoint.every_s {every_s:g}: {program} writes checkpoints by steps alone, here {rest}"
        return [sentence] if every_s else []


@dataclass(frozen=True)
class Draft:
    """What a target makes of a run.

    Attributes:
        files: text by file name.
        start: how it is started, one line.
        left_out: settings that have no counterpart there, a sentence each.
        differs: what runs in another way than here, a sentence each.
        needs: what the user has to set; its script does not start without.
    """

    files: dict[str, str]
    start: str
    left_out: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    needs: tuple["Need", ...] = ()


@dataclass(frozen=True)
class Need:
    """A variable that a script does not start without.

    Attributes:
        name: of the environment.
        what: it is; for people.
        flag: that passes its value on; ``-`` where the script uses it otherwise.
    """

    name: str
    what: str
    flag: str = "-"


def variable(setting: str) -> str:
    """The variable for a setting: ``OPTIMIZER_LR`` for ``optimizer.lr``."""
    return setting.replace(".", "_").upper()


@dataclass(frozen=True)
class Target:
    """Something that a run can be handed over to.

    Attributes:
        name: as the command line spells it.
        program: with the version whose names and rules are used.
        files: names of everything it may write.
        problems: why a run cannot be expressed there, a sentence each; empty if it can.
        make: the files, for a run without such problems.
        starts: whether its files start the run, and do not only describe a part of it.
    """

    name: str
    program: str
    files: tuple[str, ...]
    problems: Callable[[Job], list[str]]
    make: Callable[[Job], Draft]
    starts: bool = True


def make_job(config: RunConfig, cluster: Cluster, time_limit: str) -> Job:
    """The run with everything that its start depends on.

    Raises:
        ConfigError: the configuration is wrong; all problems together.
    """
    config, problems = with_model_sizes(run_part(config))
    problems += find_problems(config, trains=False, is_model_known=not problems)
    if problems:
        raise ConfigError(problems)
    # The layers of stages do not depend on the type, and no cluster has a rate for float64.
    is_priced = config.training.dtype is None or precision_of(config.training.dtype) is not None
    described = describe(config if is_priced else replace(config, training=replace(config.training, dtype=None)))
    config = with_dtype(config, cluster)
    layers, head_stage = stage_layers(described.run, described.software)
    return Job(
        config=config,
        model=config.model.resolve(config.data.vocab_size),
        schedule=config.choice().make(),
        layers_by_stage=tuple(layers),
        head_stage=head_stage,
        cluster=cluster,
        time_limit=time_limit,
    )


def training_problems(config: RunConfig) -> list[str]:
    """Why ``pipeloom train`` would refuse the run on another machine, whose text and files are not known here."""
    elsewhere = replace(
        config,
        data=replace(config.data, path=None),
        # These depend on files and on a compiler of the machine where the run will start, not of this one.
        checkpoint=replace(config.checkpoint, resume=None),
        training=replace(config.training, compile=False),
    )
    return find_problems(elsewhere)
