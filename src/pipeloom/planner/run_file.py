"""A planned step as a run configuration for ``pipeloom train``."""

from dataclasses import replace

from pipeloom.config import (
    AdapterConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from pipeloom.cost.stages import pieces_of_layers
from pipeloom.families.family import AUTO
from pipeloom.predict.describe import model_named, with_model_sizes
from pipeloom.predict.recipes import with_recipe
from pipeloom.predict.sizes import device_type
from pipeloom.predict.step import SimulatedStep
from pipeloom.schedule.whole_batch import interleaved_stage
from pipeloom.workload.dtypes import dtype_of, matmul_dtype_of
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import Balance, ModelShape, model_of
from pipeloom.workload.run import Run


def balance_of(step: SimulatedStep) -> Balance | None:
    """What keeps the loads of experts equal where backwards precede forwards; ``None``: as the run states."""
    if step.run.shape.experts is None or interleaved_stage(step.schedule) is None:
        return None
    return "none" if step.run.divides_microbatches else "microbatch"


def run_config(step: SimulatedStep, model: str | None, cluster: str, software: str) -> RunConfig:
    """The configuration of a step's run.

    Args:
        step: as planned.
        model: name in the catalog, or file; ``None`` writes the sizes.
        cluster: name or file.
        software: name or file.
    """
    run, knobs, moves = step.run, step.knobs, step.knobs.moves
    is_sharded = run.sharded != "none"
    known = _model(run.shape, model, run.seq)
    if (balance := balance_of(step)) is not None:
        known = replace(known, balance=balance)
    config = RunConfig(
        model=known,
        data=DataConfig(seq_len=run.seq),
        layout=_layout(run),
        schedule=ScheduleConfig(
            # An order that was found belongs to no family; it is in a schedule file.
            family=knobs.choice.family if knobs.found is None else AUTO,
            group_size=knobs.choice.group_size if knobs.found is None else None,
            placement=knobs.choice.placement_name if run.pp > 1 else None,
            keep=knobs.choice.keep,
            receive_buffers=knobs.receive_buffers if run.pp > 1 else ScheduleConfig.receive_buffers,
            residency=knobs.residency if run.sharded == "full" else None,
            prefetch=knobs.prefetch if is_sharded else None,
            gradient_buffers=knobs.gradient_buffers if run.sharded in ("gradients", "full") else None,
            balance=moves.balance,
            offload=moves.offload,
            device_budget=None if knobs.device_budget is None else str(knobs.device_budget),
            activation_budget=None if moves.budget_bytes is None else f"{moves.budget_bytes:.0f}",
        ),
        adapter=_adapter(run),
        training=TrainingConfig(
            dtype=dtype_of(run.precision),
            matmul_dtype=matmul_dtype_of(run.products),
            device=device_type(step.placed, step.knobs),
        ),
        machine=MachineConfig(
            cluster=cluster,
            software=software,
            attention=run.attention,
            fused_norm=run.fused_norm,
            expert_load=run.fullest_load if run.fullest_load > 1 else None,
        ),
    )
    return with_recipe(config)


def _adapter(run: Run) -> AdapterConfig:
    own = run.adapter
    return AdapterConfig() if own is None else AdapterConfig(rank=own.rank, targets=own.targets, alpha=own.alpha)


def _model(shape: ModelShape, name: str | None, seq_len: int) -> ModelConfig:
    """All sizes, or the name with the settings that its file has (``pipeloom.config.unset`` lists the others)."""
    if name is None:
        return model_of(shape, ModelConfig())
    named, known = model_named(name), named_model(name, seq_len)
    capacity = None if shape.experts is None else shape.experts.capacity
    changes = {"norm_eps": known.norm_eps, "rope_theta": known.rope_theta, "expert_capacity": capacity}
    return replace(named, family=known.family, **changes)


def named_model(name: str, seq_len: int) -> ModelConfig:
    """The settings of a model of the catalog or of a file, for sequences of so many tokens."""
    return with_model_sizes(RunConfig(model=model_named(name), data=DataConfig(seq_len=seq_len)))[0].model


def _layout(run: Run) -> Layout:
    layout = Layout(
        **run.sizes,
        loops=run.loops,
        num_microbatches=run.num_microbatches,
        microbatches=run.microbatches,
        average_every=run.updates,
        microbatch_size=run.micro_batch,
        shard=run.sharded,
        replicate=run.replicate if run.sharded != "none" and run.replicate > 1 else None,
        sequence_parallel=run.sequence_parallel,
        ep_overlap=run.ep_overlap,
        recompute=run.recompute if run.recompute_layers is None else "none",
        recompute_layers=run.recompute_layers,
        token_slices=run.slices or None,
        boundary=run.boundary if run.pp > 1 else None,
        pipeline_order=run.pipeline_order,
    )
    return layout if run.layers_by_stage is None else replace(layout, partition=pieces_of_layers(run.layers_by_stage))
