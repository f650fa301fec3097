"""A run's configuration -> the run as the cost model sees it: its model, its machine, its training program."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from pipeloom.catalog import load_cluster, load_software, read_model
from pipeloom.config import ModelConfig, RunConfig
from pipeloom.cost.analytic import layers_of_pieces
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.shape import Run, shape_of
from pipeloom.cost.software import Software
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.fast import FAMILY_OF

_T = TypeVar("_T")
_Config = TypeVar("_Config", bound=RunConfig)


@dataclass(frozen=True)
class Described:
    """A run with everything that its prediction depends on."""

    run: Run
    cluster: Cluster
    software: Software


def with_model_sizes(config: _Config) -> tuple[_Config, list[str]]:
    """The configuration with what ``model.preset`` or ``model.file`` says of the model, and what is wrong with that.

    That are the sizes, and where the file has them the epsilon of norms and the base of rotary positions. A value that
    the configuration says as well, and differently, is a problem; one that has its default is not.
    """
    model = config.model
    if (model.preset is None) == (model.file is None):
        return config, []
    problems: list[str] = []
    name = model.preset or str(model.file)
    file = load_or_note(lambda name: read_model(name, config.data.seq_len), name, problems)
    if file is None:
        return config, problems
    sized = file.over(model)
    source = "model.preset" if model.preset else "model.file"
    for item in fields(ModelConfig):
        found, size = getattr(model, item.name), getattr(sized, item.name)
        if found not in (size, item.default):
            wanted = f"must be {size}, as {source} {file.shape.name} says"
            problems.append(f"model.{item.name} {wanted}, found {found}; leave one of them out")
    return replace(config, model=sized), problems


def machine_problems(config: RunConfig) -> list[str]:
    """What is wrong with the cluster and the training program of a configuration."""
    return _machine(config)[2]


def describe(config: RunConfig) -> Described:
    """What the cost model has to know.

    Args:
        config: without problems, its model's sizes in place (``with_model_sizes``).

    Raises:
        ConfigError: cluster or program are unknown or wrong, or do not fit the run; all problems together.
    """
    cluster, software, problems = _machine(config)
    if problems or cluster is None or software is None:
        raise ConfigError(problems)
    return Described(_run(config), cluster, software)


def _machine(config: RunConfig) -> tuple[Cluster | None, Software | None, list[str]]:
    machine = config.machine
    problems: list[str] = []
    cluster = load_or_note(load_cluster, machine.cluster, problems)
    software = load_or_note(load_software, machine.software, problems)
    if cluster is not None:
        problems += _lacks(config, cluster)
    return cluster, software, problems


def _lacks(config: RunConfig, cluster: Cluster) -> list[str]:
    """Which devices a run needs that a cluster does not have."""
    layout, precision = config.layout, config.machine.precision
    num_devices = layout.pp * layout.dp * layout.tp
    lack = cluster.lack(num_devices)
    if lack is not None:
        return [f"{lack}: layout.pp {layout.pp} x layout.dp {layout.dp} x layout.tp {layout.tp}"]
    devices = dict.fromkeys(
        (kind.device.name, tuple(kind.device.peak_flops_per_s)) for kind, _ in cluster.kinds(num_devices)
    )
    return [
        f"machine.precision must be one that {name} computes in: {', '.join(known)}, found {precision}"
        for name, known in devices
        if precision not in known
    ]


def load_or_note(load: Callable[[str], _T], name: str, problems: list[str]) -> _T | None:
    """What a name of the catalog or a file stands for; ``None``, and more ``problems``, if that is wrong."""
    try:
        return load(name)
    except ConfigError as error:
        problems += [f"{name}: {problem}" for problem in error.problems]
    except UserError as error:
        problems.append(str(error))
    return None


def _run(config: RunConfig) -> Run:
    layout, machine = config.layout, config.machine
    family = config.schedule.family
    return Run(
        shape=shape_of(config.model.resolve(config.data.vocab_size)),
        seq=config.data.seq_len,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        loops=layout.loops,
        shard=layout.shard,
        micro_batch=layout.microbatch_size,
        global_batch=layout.batch_size,
        recompute=layout.recompute,
        recompute_layers=layout.recompute_layers,
        schedule=next((name for name, known in FAMILY_OF.items() if known == family), family),
        sequence_parallel=layout.sequence_parallel,
        attention=machine.attention,
        fused_norm=machine.fused_norm,
        precision=machine.precision,
        replicate=layout.replicate or 1,
        layers_by_stage=None if layout.partition is None else layers_of_pieces(layout.partition),
        placement=config.choice().placement_name,
        slices=layout.slice_lengths(config.data.seq_len) if layout.num_slices > 1 else (),
        pipeline_order=layout.pipeline_order,
    )
