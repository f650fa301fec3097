"""The options of ``pipeloom plan``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.cli.goals import Goals
from pipeloom.cli.reference import Flag, Output, Place
from pipeloom.planner.question import HEADROOM
from pipeloom.workload.boundary import Boundary
from pipeloom.workload.dtypes import Dtype, MatmulDtype
from pipeloom.workload.launchers import LauncherName
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.limits import (
    ClusterName,
    Common,
    Count,
    FamilyName,
    Headroom,
    ModelName,
    Names,
    Positive,
    ProgramName,
)
from pipeloom.workload.run import Attention


@dataclass(frozen=True, kw_only=True)
class Options(Goals):
    """Options of ``pipeloom plan``.

    Prints the fastest layouts, their step time by cause, the best layouts of other kinds, what would change the answer,
    and the expected error. A layout is skipped only if a lower bound of its step time or memory excludes it.
    """

    config: Annotated[Path | None, Place("CONFIG")] = None
    """A run file with model, batch, devices, machine. Flags override it."""
    model: Common[ModelName | None] = None
    """Model: a name of the catalog, or a file (.toml, or a Hugging Face config.json)."""
    cluster: Common[ClusterName | None] = None
    """Cluster: a name of the catalog, or a file."""
    devices: Common[tuple[Count, ...]] = ()
    """World size; several are compared. A layout uses all devices. None: those of the run file."""
    global_batch: Common[Count | None] = None
    """Global batch size, in sequences."""
    seq: Common[Count | None] = None
    """Sequence length, in tokens."""
    tokens: Common[str | None] = None
    """Tokens of the training, such as 1T: print days and price."""
    launcher: Annotated[Common[LauncherName | Literal["any"] | None], Flag("for")] = None
    """Search what this program can run, at its measured speed. any: the best layout for each. None: pipeloom, or
    --software."""
    software: ProgramName | None = None
    """Training program: a name of the catalog, or a file. None: pipeloom."""
    dtype: Common[Dtype | None] = None
    """Data type of weights and activations. None: that of the run file; else on GPUs bfloat16, or float16 where they
    lack it, and float32 on CPUs."""
    matmul_dtype: MatmulDtype | None = None
    """Data type of the operands of linear layers. Attention, head, weights and activations keep dtype. None: that of
    the run file; else dtype."""
    attention: Attention | None = None
    """Attention kernel. None: flash2."""
    fused_norm: bool | None = None
    """Norms are one kernel. None: on."""
    headroom: Headroom = HEADROOM
    """Fraction of the memory of every device that layouts leave free. The default is the mean error of predicted
    memory; it also has to cover a fragmented allocator and buffers of the network."""
    tp: Common[tuple[Count, ...]] = ()
    """Tensor-model-parallel sizes to search. None: all."""
    cp: tuple[Count, ...] = ()
    """Context-parallel sizes to search. None: those with which each rank has at least 4,096 tokens of a sequence; for
    pipeloom only 1, since its attention over parts of sequences has no fused kernel on GPUs."""
    pp: Common[tuple[Count, ...]] = ()
    """Pipeline-model-parallel sizes to search. 1 is no pipeline. None: all."""
    dp: tuple[Count, ...] = ()
    """Data-parallel sizes to search. None: all."""
    ep: tuple[Count, ...] = ()
    """Numbers of data-parallel ranks that share the experts of a layer to search. None: all that divide the experts."""
    ep_overlap: Literal["any", "on", "off"] = "any"
    """Exchanges of tokens beside the other half of a micro-batch, as layout.ep_overlap, to search."""
    loops: Common[tuple[Count, ...]] = ()
    """Virtual stages per rank to search. None: all."""
    micro_batch: Common[tuple[Count, ...]] = ()
    """Micro-batch sizes to search, in sequences. None: all."""
    families: Common[tuple[FamilyName, ...]] = ()
    """Schedules to search. None: all that the training program has."""
    shards: Common[tuple[Shard, ...]] = ()
    """State to shard over data-parallel ranks. None: all."""
    recompute: Common[tuple[Recompute, ...]] = ()
    """Activation recomputation to search. none and full together allow some of the layers, too. Without full, strategy
    keep is left out. None: all."""
    strategies: tuple[Annotated[str, Names("strategies")] | Literal["none"], ...] = ()
    """Strategies to search, which save memory or shorten the bubble. keep recomputes the micro-batches that do not fit;
    balance moves activations to ranks with free memory; offload moves them to the host; swap keeps most stages of a
    model on the host, on one device; slices cuts sequences. none: layouts without a strategy, which are also printed if
    the others lead to no layout. None: all that the training program has."""
    search_orders: Count | None = None
    """Also search an order of forwards and backwards for the seconds of the layouts with the lowest bounds, by so many
    changes for each. --out writes it as a schedule file. None: the orders of families."""
    sequence_parallel: Literal["any", "on", "off"] = "any"
    """Sequence parallelism, with tensor parallelism, to search."""
    boundary: Boundary | None = None
    """Code of messages between pipeline ranks, as layout.boundary. int8: about a quarter of the bytes of float32. None:
    that of the run file, or as they are."""
    best: Common[Count] = 10
    """Number of layouts to print."""
    budget_s: Common[Positive | None] = None
    """Most seconds of the answer. The best layouts found are printed then, with a lower bound on the rest. None: no
    limit."""
    explain: bool = True
    """Search the best layouts of other kinds, and what would change the answer."""
    out: Common[Annotated[Path | None, Output("folder")]] = None
    """Write a layout to this folder. run.toml is for `pipeloom train`, and schedule.txt has the schedule."""
    export: Annotated[Path | None, Output("folder")] = None
    """Write start files to this folder. They are for those of torchrun, Slurm, PyTorch, torchtitan and Megatron-LM that
    can run the layout."""
    html: Annotated[Path | None, Output("file")] = None
    """Write the answer as a page to this file. It has the timeline and the memory of a layout."""
    row: Count = 1
    """With --out, --export or --html: row of the table to write."""
    json: Common[bool] = False
    """Print JSON for programs. docs/plan.md lists its keys."""
