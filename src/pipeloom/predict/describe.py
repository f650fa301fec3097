"""Conversion of a run's configuration to the input of the cost model: run, cluster, training program."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from pipeloom.calls import checked
from pipeloom.catalog import find_name, load_cluster, load_software, read_model
from pipeloom.config import ModelConfig, RunConfig, decided_problems, find_problems, with_pretrained
from pipeloom.config.file import RunFile, open_run_file, parse_run, settings_in, without_stale_sizes
from pipeloom.config.paths import with_home
from pipeloom.config.resumed import passed_problems, resumed_model, resumed_problems, run_file_of
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software, with_optimizer
from pipeloom.cost.stages import layers_of_pieces
from pipeloom.cost.what_if import changed, what_if_problems, without_effect
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.recipes import with_recipe
from pipeloom.predict.stage_swaps import with_alike_stages
from pipeloom.workload.dtypes import Dtype, Precision, precision_of, products_of
from pipeloom.workload.layout import ONE_RANK
from pipeloom.workload.model import NO_FORMULAS, OF_ADAPTED, shape_of
from pipeloom.workload.optimizers import OPTIMIZERS
from pipeloom.workload.run import Run

_T = TypeVar("_T")
_Config = TypeVar("_Config", bound=RunConfig)
_MOST_TOKENS = 2048
"""Default length of sequences of a Hugging Face model that takes longer ones: messages and memory grow with it."""


def model_named(name: str) -> ModelConfig:
    """The model of a name of the catalog, or of a file or a folder."""
    preset = find_name("models", name)
    return ModelConfig(file=Path(name)) if preset is None else ModelConfig(preset=preset)


def with_model_sizes(config: _Config, given: Collection[str] = ()) -> tuple[_Config, list[str]]:
    """The configuration with the settings of ``model.preset`` or ``model.file``, and their problems.

    The settings are sizes and, if the file has them, the epsilon of norms and the base of rotary positions. A setting
    that differs from the file is a problem, unless it is a default that is not given. A run that resumes needs the file
    no more: its checkpoint has the same.

    Args:
        config: of a run.
        given: names of the settings that run file and flags contain, such as ``model.num_layers``.
    """
    model = config.model
    if (model.preset is None) == (model.file is None):
        return config, []
    problems: list[str] = []
    if (sized := resumed_model(config)) is not None:
        source = f"checkpoint.resume {config.checkpoint.resume}"
    else:
        name = model.preset or str(model.file)
        file = load_or_note(lambda name: read_model(name, config.data.seq_len, adapts=True), name, problems)
        if file is None:
            return config, problems
        sized = file.over(model)
        source = "model.preset" if model.preset else "model.file"
        source = "checkpoint.init" if model.preset is None and model.file == config.checkpoint.init else source
        source += f" {name}"
    return replace(config, model=sized), [*problems, *_other_sizes(model, sized, given, source)]


def _other_sizes(model: ModelConfig, sized: ModelConfig, given: Collection[str], source: str) -> Iterator[str]:
    """A sentence for each setting of a model that is set otherwise than its source sets it."""
    usual = sized.usual_values
    for item in fields(ModelConfig):
        name, found, size = f"model.{item.name}", getattr(model, item.name), getattr(sized, item.name)
        size = usual.get(item.name) if size is None else size
        # None stands for what the file has, as in flags over a run file.
        if found == item.default and (found is None or name not in given):
            continue
        is_read = sized.adapted is None or item.name in OF_ADAPTED
        # Other values than the default may be those of a checkpoint, whose run file has them.
        if not is_read and (found != size or found == item.default):
            yield f"{name} has no effect on a model that classes of transformers compute, of {source}; leave it out"
        elif found != size:
            wanted = "unset" if size is None else size
            yield f"{name} must be {wanted}, as in {source}, found {found}; leave {name} out"


def pretrained_run(folder: Path, known: _Config) -> _Config:
    """A run whose weights are those of a Hugging Face folder, on one rank, with sequences as long as the model takes.

    Raises:
        UserError: its model is not supported.
    """
    length = read_model(str(folder), adapts=True).most_tokens
    return replace(
        known,
        model=ModelConfig(file=folder),
        data=replace(known.data, seq_len=min(length or _MOST_TOKENS, _MOST_TOKENS)),
        layout=ONE_RANK,
        checkpoint=replace(known.checkpoint, init=folder),
    )


def completed(
    config: _Config, judge: Callable[..., list[str]], given: Collection[str] = ()
) -> tuple[_Config, list[str]]:
    """The configuration with what other settings decide, and all of its problems.

    Decided are the sizes of its model, the tokenizer of its weights, and ``layout.loops`` of a family that takes only
    one number.

    Args:
        config: of a run.
        judge: returns the problems of a configuration; called with ``is_model_known``.
        given: as of ``with_model_sizes``.
    """
    passed, unused = passed_problems(config), resumed_problems(config)
    if unused:  # what follows from them is not a problem of its own
        own = replace(config.checkpoint, init=None)
        config = replace(config, checkpoint=own, adapter=replace(config.adapter, init=None))
    config, problems = with_model_sizes(
        with_pretrained(with_recipe(config.with_known_loops().with_most_microbatches())), given
    )
    return config, [*unused, *passed, *problems, *judge(config, is_model_known=not problems)]


def described_problems(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    """Problems of a run that is predicted, not trained on this machine."""
    adapted = [] if config.model.adapted is None else [f"model.file {config.model.file}: {NO_FORMULAS}"]
    found = decided_problems(config, trains=False, is_model_known=is_model_known)
    return [*found, *adapted, *machine_problems(config)]


@checked
def load_run(file: str | Path | None = None, **sections: Mapping[str, Any]) -> RunConfig:
    """Read a run file, and override settings.

    Examples:
        >>> from pipeloom import load_run
        >>> run = load_run(layout={"pp": 2, "loops": 3}, training={"steps": 20})
        >>> run.layout.num_stages
        6
        >>> load_run(layout={"loop": 2})
        Traceback (most recent call last):
        ...
        pipeloom.errors.ConfigError: the run has 1 problem:
          - there is no setting 'layout.loop'; did you mean 'layout.loops'?

    Args:
        file: a TOML file with the sections and keys of ``RunConfig``; its paths are relative to its folder. ``None``:
            the defaults, which are those of ``pipeloom train``, or with ``checkpoint={"resume": ...}`` the settings of
            the run that wrote the checkpoint.
        sections: section -> settings, which override the file like flags of the command line.

    Returns:
        The configuration, with the sizes of its model; ``train``, ``predict_step`` and ``verify_gradients`` take it.

    Raises:
        ConfigError: the file or the settings are wrong; has all problems.
        UserError: the file cannot be read, or is not TOML.
    """
    resume = sections.get("checkpoint", {}).get("resume")
    if file is None and isinstance(resume, str | Path):
        file = run_file_of(Path(resume))
    own = RunFile(*parse_run({}), frozenset()) if file is None else open_run_file(Path(file))
    config, problems, given = own
    if sections:
        config, found = parse_run(sections, own.config)
        config = without_stale_sizes(config, own.config)
        problems += found
    config, found = completed(with_home(config), partial(find_problems, trains=False), given | settings_in(sections))
    problems += found
    if problems:
        raise ConfigError(problems, str(file or "the run"))
    return config


def machine_problems(config: RunConfig) -> list[str]:
    """Problems of the cluster and the training program of a configuration."""
    return _machine(config)[2]


def describe(config: RunConfig) -> Placed:
    """The run of a configuration on its cluster with its training program.

    Args:
        config: without problems, with the sizes of its model (``with_model_sizes``).

    Raises:
        ConfigError: cluster or program are unknown, wrong, or do not fit the run; has all problems.
    """
    cluster, software, problems = _machine(config)
    if problems or cluster is None or software is None:
        raise ConfigError(problems)
    precision = precision_of(_dtype(config, cluster))
    assert precision is not None, "the problems name a type without costs"
    run = described_run(config, precision)
    if config.swaps_stages and software.partition == "balanced":
        run = with_alike_stages(run, software)
    placed = Placed(run, cluster, software)
    if software.has_lanes and placed.balanced is not placed:
        # Training does not read the cluster and balances layers as if all ranks were equally fast.
        return placed.of(replace(run, layers_by_stage=placed.layers))
    return placed


def with_dtype(config: _Config, cluster: Cluster) -> _Config:
    """The configuration with ``training.dtype``; if unset, the default of predictions for the cluster."""
    return replace(config, training=replace(config.training, dtype=_dtype(config, cluster)))


def _dtype(config: RunConfig, cluster: Cluster) -> Dtype:
    return config.training.dtype or _default_dtype(cluster, config.layout.num_ranks)


def with_update_of(software: Software, config: RunConfig) -> Software:
    """The program with the update of a run."""
    return with_optimizer(software, config.optimizer.rule, wide_weights=config.optimizer.wide_weights)


def _default_dtype(cluster: Cluster, num_devices: int) -> Dtype:
    """The default dtype for the first devices; for one device if there are too few, which is reported elsewhere."""
    is_there = num_devices >= 1 and cluster.lack(num_devices) is None
    return cluster.default_dtype(num_devices if is_there else 1)


def _machine(config: RunConfig) -> tuple[Cluster | None, Software | None, list[str]]:
    machine = config.machine
    problems: list[str] = []
    cluster = load_or_note(load_cluster, machine.cluster, problems)
    software = load_or_note(load_software, machine.software, problems)
    if cluster is not None:
        cluster = changed_cluster(cluster, machine.what_if, config.layout.num_ranks, problems)
    if software is not None and config.optimizer.name in OPTIMIZERS:  # an unknown name is reported elsewhere
        software = with_update_of(software, config)
    if cluster is not None:
        problems += _lacks(config, cluster)
    problems += [] if software is None else own_program_problems(config, software)
    return cluster, software, problems


def own_program_problems(config: RunConfig, software: Software) -> list[str]:
    """Settings of a run that another training program does not have, a sentence each."""
    if software.has_lanes:
        return []
    optimizer, layout, model = config.optimizer, config.layout, config.model
    # An unknown name is reported elsewhere.
    has_matrices = optimizer.name in OPTIMIZERS and optimizer.rule.matrices is not None
    own = {
        "schedule.file": (config.schedule.file is not None, ", which has its own order"),
        "data.attention document": (config.data.by_document, ", which has its own attention"),
        "training.freeze_layers": (config.training.freeze_layers is not None, ""),
        f"optimizer.name {optimizer.name}": (has_matrices, ", whose update is priced by its bytes alone"),
        "optimizer.update stage": (optimizer.known_update.within_step, ""),
        "optimizer.wide_weights false": (not optimizer.wide_weights, ", which updates float32 weights"),
        "layout.boundary": (layout.boundary is not None, ", which sends tensors as they are"),
        "layout.average_every": (layout.average_every is not None, ", which reduces gradients"),
        "layout.microbatches": (layout.microbatches is not None, ", whose replicas have as many"),
        "adapter.rank": (config.adapter.rank is not None, ""),
        "model.experts": (model.experts is not None and not software.takes_experts, ""),
        "model.share_layers": (model.share_layers is not None, ""),
        "model.density": (model.density is not None, ", whose matrices are dense"),
    }
    return [
        f"{name} needs machine.software pipeloom, found {software.name}{what}"
        for name, (is_given, what) in own.items()
        if is_given
    ]


def changed_cluster(cluster: Cluster, changes: Mapping[str, str], num_devices: int, problems: list[str]) -> Cluster:
    """The cluster with its figures changed; as it is if the changes have problems, which are added.

    Args:
        cluster: as it is.
        changes: name -> a factor or an absolute value (``pipeloom.cost.what_if``).
        num_devices: of the run.
        problems: to which a sentence is added for everything that is wrong.
    """
    found = what_if_problems(changes) or without_effect(cluster, changes, max(1, num_devices))
    problems += found
    return cluster if found else changed(cluster, changes)


def _lacks(config: RunConfig, cluster: Cluster) -> list[str]:
    """Problems of a cluster that lacks the devices or the dtype of a run."""
    layout, num_devices = config.layout, config.layout.num_ranks
    lack = cluster.lack(num_devices)
    if lack is not None:
        return [f"{lack}: {layout.axes.product('layout.')}"]
    devices = dict.fromkeys(
        (kind.device.name, tuple(kind.device.peak_flops_per_s)) for kind, _ in cluster.kinds(num_devices)
    )
    dtype = _dtype(config, cluster)
    found = [f"training.dtype {problem}" for name, known in devices if (problem := dtype_problem(dtype, name, known))]
    narrow = config.training.matmul_dtype
    if narrow is not None:
        lacking = [name for name, known in devices if products_of(narrow) not in known]
        found += [f"training.matmul_dtype {narrow}: {name} has no peak for it; leave it out" for name in lacking]
    return found


def asked_precision(dtype: Dtype | None, cluster: Cluster, num_devices: int) -> Precision:
    """The precision of a dtype in the cost model.

    Args:
        dtype: ``None`` for the default of the devices.
        cluster: the cluster.
        num_devices: number of its first devices that are used.

    Raises:
        ConfigError: the cost model does not support the dtype.
    """
    dtype = dtype or _default_dtype(cluster, num_devices)
    precision = precision_of(dtype)
    if precision is None:
        device = cluster.device
        raise ConfigError([f"the dtype {dtype_problem(dtype, device.name, device.peak_flops_per_s)}"], "the question")
    return precision


def dtype_problem(dtype: Dtype, device: str, precisions: Iterable[str]) -> str | None:
    """Why there are no predictions of a dtype for a device; ``None`` if there are.

    Args:
        dtype: of weights and activations.
        device: its name.
        precisions: for which it has peaks.
    """
    known = [one for one in get_args(Dtype) if precision_of(one) in set(precisions)]
    return None if dtype in known else f"must be one that {device} computes in: {', '.join(known)}, found {dtype}"


def load_or_note(load: Callable[[str], _T], name: str, problems: list[str]) -> _T | None:
    """Load a name of the catalog or a file; on an error add to ``problems`` and return ``None``."""
    try:
        return load(name)
    except ConfigError as error:
        problems += [f"{name}: {problem}" for problem in error.problems]
    except UserError as error:
        problems.append(str(error))
    return None


def described_run(config: RunConfig, precision: Precision) -> Run:
    """The run of a configuration that has its model's sizes, without cluster and program."""
    layout, machine = config.layout, config.machine
    return Run(
        shape=shape_of(config.resolved_model),
        seq=config.data.seq_len,
        **layout.axes._asdict(),
        loops=layout.num_loops,
        shard=layout.shard,
        micro_batch=layout.microbatch_size,
        global_batch=layout.batch_size,
        recompute=layout.recompute,
        recompute_layers=layout.recompute_layers,
        sequence_parallel=layout.sequence_parallel,
        attention=machine.attention,
        fused_norm=machine.fused_norm,
        precision=precision,
        products=products_of(config.training.matmul_dtype),
        replicate=layout.replicate or 1,
        ep=layout.ep,
        ep_overlap=layout.ep_overlap,
        expert_load=machine.known_expert_load,
        layers_by_stage=None if layout.partition is None else layers_of_pieces(layout.partition),
        placement=config.choice().placement_name,
        slices=layout.slice_lengths(config.data.seq_len) if layout.num_slices > 1 else (),
        pipeline_order=layout.pipeline_order,
        by_document=config.data.by_document,
        frozen_pieces=config.frozen_pieces,
        adapter=config.pairs,
        boundary=layout.boundary,
        microbatches=layout.own_microbatches,
        updates=None if layout.average_every is None else layout.updates_by_replica,
        delays_average=config.optimizer.outer_delayed,
        updates_stages=config.optimizer.known_update.within_step,
    )


def profile_command(config: RunConfig) -> str:
    """The command that measures this machine for predictions of a run.

    On a CPU with as many processes as the run has: a cluster file has no more devices on a node than were measured, and
    predictions place the others on further nodes.
    """
    ranks = config.layout.num_ranks
    is_several = config.training.device == "cpu" and ranks > 1
    return f"pipeloom profile --processes {ranks}" if is_several else "pipeloom profile"


def why_training_may_differ(config: RunConfig, predicted: Dtype | None = None) -> str | None:
    """Why ``train`` may run another step than ``simulate`` predicts; ``None`` if it does not.

    Everything else depends only on the configuration (``tests/conformance/test_every_command.py``).

    Args:
        config: of the run.
        predicted: dtype of its prediction; ``None`` if nothing is predicted.
    """
    reasons: list[str] = []
    if config.layout.token_slices == "auto":
        reasons.append("with layout.token_slices auto train measures slices, simulate predicts them")
    if config.layout.divides_batch:
        reasons.append("with layout.microbatches auto train measures replicas, simulate takes them as equally fast")
    if config.data.by_document and config.training.device == "cuda":
        reasons.append(
            "with data.attention document train skips keys of other documents, simulate counts all earlier ones"
        )
    trained, device = config.training.known_dtype, config.training.device
    # The defaults differ: train uses that of its device, simulate that of the cluster.
    if predicted not in (None, trained):
        default = f"train uses {trained} for training.device {device}, simulate {predicted} for machine.cluster"
        reasons.append(f"without training.dtype {default}; set it")
    return f"the trained run may differ from the simulated one: {'; '.join(reasons)}" if reasons else None
