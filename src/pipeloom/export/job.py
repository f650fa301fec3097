"""A run for export: its processes on nodes and layers in stages; and the interface of targets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from pipeloom.checkpoint.checkpoint_folder import is_hugging_face
from pipeloom.config import ModelConfig, RunConfig, find_problems, run_part, unset, with_pretrained
from pipeloom.cost.hardware import Cluster, Device
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import stage_layers
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.describe import describe, with_dtype, with_model_sizes
from pipeloom.predict.places import node_problems, num_hosts
from pipeloom.predict.recipes import recipe_notes, with_recipe
from pipeloom.predict.step import Prediction, simulate_step
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.terminal.words import count, memory_lack, seconds
from pipeloom.workload.dtypes import precision_of
from pipeloom.workload.launchers import Launcher, optimizer_problems, update_problems


@dataclass(frozen=True)
class Site:
    """Names that a scheduler or a cluster needs, beside the run.

    Attributes:
        name: of the job; a DNS label.
        time_limit: of a Slurm job, in a format of ``sbatch --time``.
        image: container image with pipeloom; ``None``: no target may need one.
        volume: name of a volume that all nodes share, a colon, and the folder where they find it.
    """

    name: str = "pipeloom"
    time_limit: str = "24:00:00"
    image: str | None = None
    volume: str = "pipeloom:/shared"

    @property
    def volume_name(self) -> str:
        """Name of the volume."""
        return self.volume.split(":")[0]

    @property
    def shared_folder(self) -> str:
        """Where the nodes find the volume."""
        return self.volume.split(":")[1]

    @property
    def run_folder(self) -> str:
        """The run folder on the shared volume."""
        return f"{self.shared_folder}/{self.name}"


@dataclass(frozen=True)
class Job:
    """A run and its nodes.

    Attributes:
        config: without problems, with the sizes of its model and its dtype.
        model: resolved.
        schedule: compute actions only.
        layers_by_stage: number of layers of each stage, without the first stage's embedding.
        head_stage: the stage of the head.
        cluster: where it runs.
        placed: the run in the cost model, with its cluster and its program.
        site: of the nodes.
    """

    config: RunConfig
    model: ModelConfig
    schedule: Schedule
    layers_by_stage: tuple[int, ...]
    head_stage: int
    cluster: Cluster
    placed: Placed
    site: Site

    @cached_property
    def order(self) -> tuple[tuple[Action, ...], ...]:
        """For each pipeline rank its forwards and backwards, without recomputations."""
        return tuple(tuple(action for action in row if action.kind is not Kind.RECOMPUTE) for row in self.schedule.rows)

    def needs(self, flags: dict[str, str]) -> tuple["Need", ...]:
        """The variables for hyperparameters that the user must set, for a program with these flags.

        Args:
            flags: setting -> flag; ``-`` if the script uses the variable in another way. Others are not needed.
        """
        missing = unset(self.config)
        return tuple(Need(variable(name), missing[name], flag) for name, flag in flags.items() if name in missing)

    @property
    def recipe(self) -> tuple[str, ...]:
        """Sentences on the recipe of the model: its source, and what of it is changed or left out."""
        return recipe_notes(self.config)

    @property
    def num_nodes(self) -> int:
        """Nodes that the run needs, as launchers count them: hosts of the cluster."""
        return num_hosts(self.cluster, self.config.layout.num_ranks)

    @property
    def processes_per_node(self) -> int:
        """Number of processes on each node, if all nodes have the same number."""
        return min(self.config.layout.num_ranks, self.cluster.host_size)

    @property
    def dtype(self) -> str:
        """Data type of weights and activations: fp32, bf16, fp16 or fp64."""
        return precision_of(self.config.training.known_dtype) or "fp64"

    @property
    def device(self) -> Device:
        """The device of the first rank, which is that of all where nodes are of one kind."""
        return self.cluster.kinds(self.config.layout.num_ranks)[0][0].device

    @property
    def has_gpus(self) -> bool:
        """Whether the cluster's devices are GPUs."""
        return self.cluster.device.is_gpu

    @property
    def has_amd_gpus(self) -> bool:
        """Whether some of the run's devices are AMD's GPUs."""
        return any(kind.device.vendor == "amd" for kind, _ in self.cluster.kinds(self.config.layout.num_ranks))

    @property
    def takes_gpus(self) -> bool:
        """Whether a scheduler has to give the nodes' GPUs to the run."""
        return self.has_gpus or self.config.training.device == "cuda"

    def pieces_of(self, stage: int) -> tuple[bool, range, bool]:
        """Pieces of a stage: whether it has the embedding, its layers, whether it has the head."""
        begin = sum(self.layers_by_stage[:stage])
        return stage == 0, range(begin, begin + self.layers_by_stage[stage]), stage == self.head_stage

    def whole_problems(self) -> list[str]:
        """Why other programs cannot run the step: token slices, frozen layers, adapters; empty without these."""
        config, found = self.config, list[str]()
        if config.training.z_loss:
            found.append(f"training.z_loss {config.training.z_loss}: the export is of runs without it; leave it out")
        found += update_problems(config.optimizer.known_update)
        layout, only = config.layout, "the export is of runs that train all weights; leave it out"
        if layout.cuts_sequences:
            found.append(
                f"layout.token_slices {layout.token_slices}: the program runs whole sequences only; leave it out"
            )
        for name, value in (
            ("training.freeze_layers", config.training.freeze_layers),
            ("adapter.rank", config.adapter.rank),
        ):
            if value is not None:
                found.append(f"{name} {value}: {only}")
        return found

    def accumulation_problems(self, program: str) -> list[str]:
        """Why a program that accumulates gradients cannot run the order of a run without a pipeline."""
        microbatches = [action.microbatch or 0 for action in self.order[0]]
        if len(self.order) > 1 or microbatches == sorted(microbatches):
            return []
        what = f"layout.pp 1 with schedule.family {self.config.family}: without a pipeline {program}"
        return [f"{what} runs each micro-batch forward and back before the next; use depth-first"]

    def order_problems(self, program: str) -> list[str]:
        """Settings of the step that only pipeloom supports: recomputation, moves, swaps, order of ranks."""
        schedule, given = self.config.schedule, self.config.recipe().given
        reasons = {
            "schedule.balance": (schedule.balance, "does not move activations to other ranks"),
            "schedule.offload": (schedule.offload, "does not move activations to the host as the schedule does"),
            "schedule.keep": (schedule.keep is not None, "cannot select micro-batches to recompute"),
            "schedule.device_budget": (schedule.device_budget is not None, "keeps all stages on the device"),
            "layout.average_every": (self.config.layout.average_every is not None, "reduces gradients in every step"),
            "layout.microbatches": (self.config.layout.microbatches is not None, "gives all replicas as many"),
            "layout.boundary": (self.config.layout.boundary is not None, "sends tensors between stages as they are"),
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

    def start_problems(self, launcher: Launcher) -> list[str]:
        """Why a program with one start command for all nodes cannot have the run's model, stages and optimizer."""
        found, last = self.node_problems(), len(self.layers_by_stage) - 1
        if self.head_stage != last:
            found.append(
                f"machine.software {self.config.machine.software} puts the head into stage {self.head_stage}, and "
                f"leaves stage {last} empty; name a layout.partition"
            )
        data = self.config.data
        found += launcher.model_problems(self.model, self.dtype, data.seq_len, by_document=data.by_document)
        return [*found, *optimizer_problems(launcher.title, self.config.optimizer.name)]

    def weight_problems(self, program: str, instead: str | None) -> list[str]:
        """Why a program would train from random weights instead of those that the run starts from.

        Args:
            program: in sentences.
            instead: how its user starts it from the weights of a Hugging Face folder; ``None`` if the export does that.
        """
        init, resume = self.config.checkpoint.init, self.config.checkpoint.resume
        if resume is not None:
            way = "export its weights by `pipeloom export --format hf`, and name that folder as checkpoint.init"
            return [f"checkpoint.resume {resume}: {program} cannot read the state of this run; {way}"]
        if init is None:
            return []
        if not is_hugging_face(init):
            way = "name its weights from `pipeloom export --format hf` instead"
            return [f"checkpoint.init {init}: {program} cannot read it, it is no Hugging Face folder; {way}"]
        if instead is None:
            return []
        return [f"checkpoint.init {init}: {program} cannot read a Hugging Face folder; {instead}"]

    def node_problems(self) -> list[str]:
        """Why one command cannot start the run on every node; empty if it can."""
        return node_problems(self.cluster, self.config.layout.num_ranks)

    def restart_differences(self) -> list[str]:
        """That a restart begins anew where nothing is saved before the end; empty otherwise."""
        if self.config.checkpoint.every is not None or self.config.checkpoint.every_s:
            return []
        unset = "checkpoint.every is not set and checkpoint.every_s is 0"
        return [f"{unset}: a run that fails has no checkpoint and starts again"]

    @cached_property
    def prediction(self) -> Prediction | None:
        """Time and memory of a step; ``None`` if the step cannot be predicted."""
        try:
            return simulate_step(self.placed, self.config.knobs()).prediction
        except UserError:
            return None

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step; ``None`` if the step cannot be predicted."""
        return None if self.prediction is None else self.prediction.step_time_s

    @property
    def misfit(self) -> str | None:
        """Which rank needs more memory than its devices have, a sentence; ``None`` if the prediction has no such."""
        found = self.prediction
        if found is None or found.fits:
            return None
        rank = found.fullest_rank
        lack = memory_lack(rank, found.memory.total_bytes, found.device_bytes[rank])
        return f"{lack}, as predicted for machine.software {self.placed.software.name}; simulate prints what would help"

    @cached_property
    def interval(self) -> int | None:
        """Steps between checkpoints of a program that counts steps; ``None``: one after the last step alone.

        They are ``checkpoint.every``, or else those of ``checkpoint.every_s`` by the predicted step time.
        """
        own = self.config.checkpoint
        if own.every is not None or not own.every_s or self.step_s is None:
            return own.every
        return max(1, math.floor(own.every_s / self.step_s))

    def clock_differences(self, program: str) -> list[str]:
        """What a program that counts steps makes of ``checkpoint.every_s``, a sentence; empty where it is the same."""
        own, step_s = self.config.checkpoint, self.step_s
        if not own.every_s or (own.every is not None and step_s is not None and own.every * step_s <= own.every_s):
            return []
        what = f"checkpoint.every_s {own.every_s:g}: {program} counts steps, here"
        if self.interval is None:
            return [f"{what} those of the whole run, as there is no prediction of a step; set checkpoint.every"]
        if own.every is not None:
            return [f"{what} the {count(own.every, 'step')} of checkpoint.every alone"]
        assert step_s is not None, "the interval follows from it"
        return [f"{what} {count(self.interval, 'step')}, an estimate from the predicted step time, {seconds(step_s)}"]


@dataclass(frozen=True)
class Draft:
    """Files of a target and notes about them.

    Attributes:
        files: file name -> text.
        start: the start command, one line.
        left_out: settings without a counterpart in the program, a sentence each.
        differs: differences from pipeloom, a sentence each.
        needs: variables without which the script does not start.
    """

    files: dict[str, str]
    start: str
    left_out: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    needs: tuple["Need", ...] = ()


@dataclass(frozen=True)
class Need:
    """An environment variable without which a script does not start.

    Attributes:
        name: of the variable.
        what: description of its value.
        flag: of the program, for its value; ``-`` if the script uses it in another way.
    """

    name: str
    what: str
    flag: str = "-"


def variable(setting: str) -> str:
    """The environment variable of a setting: ``OPTIMIZER_LR`` for ``optimizer.lr``."""
    return setting.replace(".", "_").upper()


@dataclass(frozen=True)
class Target:
    """A target of an export.

    Attributes:
        name: on the command line.
        program: the program, with the version whose names and rules are used.
        files: names of all files that it may write.
        problems: returns why it cannot express a run, a sentence each; empty if it can.
        make: returns the files of a run without such problems.
        starts: whether its files start the run; otherwise they describe a part of it.
        site: names of the fields of ``Site`` that its files have.
    """

    name: str
    program: str
    files: tuple[str, ...]
    problems: Callable[[Job], list[str]]
    make: Callable[[Job], Draft]
    starts: bool = True
    site: tuple[str, ...] = ()

    @property
    def needs_image(self) -> bool:
        """Whether it runs containers; without an image it is written only where it is named."""
        return "image" in self.site


def make_job(config: RunConfig, cluster: Cluster, site: Site) -> Job:
    """A run for export.

    Raises:
        ConfigError: the configuration is wrong; has all problems.
    """
    config, problems = with_model_sizes(with_pretrained(with_recipe(run_part(config))))
    problems += find_problems(config, trains=False, is_model_known=not problems)
    if problems:
        raise ConfigError(problems)
    # The layers of stages do not depend on the dtype, and no cluster has a peak for float64.
    is_priced = config.training.dtype is None or precision_of(config.training.dtype) is not None
    described = describe(config if is_priced else replace(config, training=replace(config.training, dtype=None)))
    config = with_dtype(config, cluster)
    layers, head_stage = stage_layers(described.run, described.software)
    return Job(
        config=config,
        model=config.resolved_model,
        schedule=config.choice().make(),
        layers_by_stage=tuple(layers),
        head_stage=head_stage,
        cluster=cluster,
        placed=Placed(described.run, cluster, described.software),
        site=site,
    )


def training_problems(config: RunConfig) -> list[str]:
    """Why ``pipeloom train`` would refuse the run on another machine, without checks of that machine's files."""
    elsewhere = replace(
        config,
        data=replace(config.data, path=None),
        # These depend on files and a compiler of the other machine.
        checkpoint=replace(config.checkpoint, resume=None),
        training=replace(config.training, compile=False),
    )
    return find_problems(elsewhere)
