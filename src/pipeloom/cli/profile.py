"""``pipeloom profile``: this machine, measured, as a cluster file."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.idle import each, idle_problems, without
from pipeloom.cli.reference import Command, Output
from pipeloom.config.paths import names_file
from pipeloom.cost.hardware import Cluster
from pipeloom.errors import ConfigError
from pipeloom.system.files import write_text
from pipeloom.workload.layout import Recompute
from pipeloom.workload.limits import Common, ModelName

if TYPE_CHECKING:
    from pipeloom.config import ModelConfig
    from pipeloom.measure.findings import Findings, Timing
    from pipeloom.measure.machine import Request
    from pipeloom.measure.pieces import PieceRequest


_MACHINE = 1 / 3
"""Part of the time that the machine gets where a model is measured as well."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom profile``.

    Measures matrix products, memory bandwidth, launch times of the host, messages and collectives.
    """

    output: Common[Annotated[Path, Output("file")]] = Path("cluster.toml")
    """Cluster file to write. Its name without the extension is the name of the cluster."""
    device: Common[Literal["cpu", "cuda"] | None] = None
    """Device to measure. None: cuda if there is a CUDA device, else cpu."""
    processes: Common[int | None] = None
    """Processes that compute and exchange messages. With 1, links are not measured. None: one per core or GPU, at
    most 8."""
    budget_s: Common[float] = 40.0
    """Seconds for all measurements. Each repeats until its median is stable or its share of the time is used."""
    model: Common[ModelName | None] = None
    """Also measure the layers of this model as they train. None: the machine alone."""
    seq: int = 128
    """With --model: tokens of a sequence."""
    micro_batches: tuple[int, ...] = (1, 2, 4)
    """With --model: micro-batch sizes to measure, in sequences."""
    tp: tuple[int, ...] = (1,)
    """With --model: tensor-model-parallel sizes to measure. Each must divide the number of processes."""
    recompute: tuple[Recompute, ...] = ("none",)
    """With --model: kinds of activation recomputation to measure."""
    sequence_parallel: bool = False
    """With --model: sequence parallelism in addition to tensor parallelism."""
    json: Common[bool] = False
    """Print JSON for programs: the cluster and every measurement, in SI units."""


def _without_ranks(options: Options) -> str:
    return "" if max(options.tp, default=1) > 1 else "without --tp of at least 2"


COMMAND = Command(
    name="profile",
    options=Options,
    examples={
        "pipeloom profile --output here.toml": "then: pipeloom simulate --machine.cluster ./here.toml",
        "pipeloom profile --model ./config.json --micro-batches 1 2": "with the layers of a model",
    },
    idle={
        **each(("seq", "micro_batches", "tp", "recompute"), without("model")),
        "sequence_parallel": (without("model"), _without_ranks),
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, measure with own processes or with those of a launcher, write the file, print a table."""
    options, problems = read_flags(COMMAND, words)
    problems += idle_problems(COMMAND, words)
    from pipeloom.catalog.cluster_files import cluster_to_toml
    from pipeloom.measure.describe import describe_cluster
    from pipeloom.measure.machine import Request, measure_machine
    from pipeloom.terminal.progress import restore_terminal

    # One budget for both: --budget-s limits the whole command.
    share = 1.0 if options.model is None else _MACHINE
    request = or_note(lambda: Request.make(options.device, options.processes, options.budget_s * share), problems)
    pieces_of = (
        None
        if options.model is None or request is None
        else or_note(lambda: _piece_request(options, request), problems)
    )
    if problems or request is None:
        raise ConfigError(problems, SOURCE)
    try:
        findings = measure_machine(request)
    except BaseException:
        # Processes that were killed leave a terminal without a cursor.
        restore_terminal(sys.stderr)
        raise
    if findings is None:
        return 0
    cluster, notes = describe_cluster(options.output.stem, findings)
    if pieces_of is not None:
        cluster, notes = _with_pieces(cluster, notes, pieces_of)
    write_text(options.output, cluster_to_toml(cluster, notes))
    if options.json:
        print(json.dumps({"file": str(options.output), "cluster": asdict(cluster), "findings": asdict(findings)}))
    else:
        _print(options.output, cluster, findings)
    return 0


def _piece_request(options: Options, request: "Request") -> "PieceRequest":
    """What is to be measured of a model.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    from pipeloom.config import DataConfig, RunConfig
    from pipeloom.measure.host import num_devices
    from pipeloom.measure.pieces import PieceRequest
    from pipeloom.predict.describe import model_named, with_model_sizes
    from pipeloom.training.optimizers.optimizer import make_optimizer

    run = RunConfig(model=model_named(options.model or ""), data=DataConfig(seq_len=options.seq))
    config, problems = with_model_sizes(run)
    model = config.model.resolve(1)
    problems += _piece_problems(options, request, model)
    if problems:
        raise ConfigError(problems, "the command line")
    return PieceRequest(
        # A window of at least a sequence has no effect on what is measured.
        model=replace(model, window=None, full_attention_layers=None, rope_local_theta=None),
        seq_len=options.seq,
        micro_batches=options.micro_batches,
        tp=options.tp,
        recompute=options.recompute,
        sequence_parallel=options.sequence_parallel,
        kind=request.kind,
        num_processes=request.num_processes,
        num_cores=num_devices("cpu"),
        budget_s=options.budget_s - request.budget_s,
        make_optimizer=partial(make_optimizer, config.optimizer),
        clip_grad_norm=config.optimizer.known_clip_grad_norm,
    )


def _piece_problems(options: Options, request: "Request", model: "ModelConfig") -> list[str]:
    from pipeloom.execute.processes.world import is_launched

    sizes = {"--seq": (options.seq,), "--micro-batches": options.micro_batches, "--tp": options.tp}
    found = [
        f"{flag} must be one whole number of at least 1 or more of them, found {' '.join(map(str, values)) or 'none'}"
        for flag, values in sizes.items()
        if not values or min(values) < 1
    ]
    kv_heads = model.num_kv_heads or 1
    found += [
        f"--tp must divide {request.num_processes} processes, {options.seq} tokens and {kv_heads} key and value heads, "
        f"found {tp}"
        for tp in options.tp
        if tp > 0 and (request.num_processes % tp or options.seq % tp or kv_heads % tp)
    ]
    if model.has_window(options.seq):
        found.append(
            f"--seq must be at most the sliding window of --model, {model.window} tokens, found {options.seq}: a "
            "cluster file has the seconds of equal layers that see all tokens; other windows are closed forms"
        )
    if model.attn_softcap is not None or model.logit_softcap is not None:
        found.append(f"--model must have the soft caps of its family {model.family}, as a cluster file has no others")
    if model.experts is not None and (model.expert_every or 1) > 1:
        found.append(
            f"--model must have experts in every layer or in none, found model.expert_every {model.expert_every}: a "
            "cluster file has the seconds of equal layers"
        )
    # Layers are the difference between stages of two sizes.
    if model.num_layers < 2:
        found.append(f"--model must have 2 layers or more, to separate a layer from a stage, found {model.num_layers}")
    if is_launched():
        found.append("--model is measured by processes of its own, found those of a launcher; start without one")
    return found


def _with_pieces(
    cluster: Cluster, notes: dict[str, list[str]], pieces_of: "PieceRequest"
) -> tuple[Cluster, dict[str, list[str]]]:
    """The cluster with a model's pieces, measured now, and the comments on them in its file."""
    from pipeloom.measure.pieces import measure_pieces

    found = measure_pieces(pieces_of)
    how = "CPU time of a process" if pieces_of.shares_cores else "Seconds"
    about = [
        f"{how}, forward and backward of one micro-batch, while all of {pieces_of.num_processes} processes computed.",
        f"The lower quartile of {found.rounds} rounds.",
    ]
    about_pieces = {"pieces": about, "update": ["Gradients to zero, their norm, clipping and AdamW, of one rank."]}
    return replace(cluster, pieces=found.pieces, update=found.update), {**notes, **about_pieces}


def _piece_rows(cluster: Cluster) -> "Iterator[tuple[str, str, Timing | None]]":
    for found in cluster.pieces:
        run = found.run
        name = f"micro-batch {run.micro_batch}, tp {run.tp}"
        name += "" if run.recompute == "none" else f", {run.recompute} recomputation"
        for part, (forward_s, backward_s) in (("layer", found.layer), ("head", found.head)):
            yield f"{part}, {name}", f"{forward_s * 1e3:.2f} + {backward_s * 1e3:.2f} ms", None
        if found.message_s:
            yield "  message between stages", f"{found.message_s * 1e3:.2f} ms", None


def _print(path: Path, cluster: Cluster, findings: "Findings") -> None:
    from pipeloom.measure.describe import crowding, table_rows
    from pipeloom.terminal.console import make_console, print_table, table
    from pipeloom.terminal.words import count, quoted

    rows = table("what", ["measured", "spread", "repeats"])
    for what, value, timing in chain(table_rows(findings), _piece_rows(cluster)):
        rows.add_row(what, value, *(("", "") if timing is None else (f"{timing.spread:.0%}", str(timing.repeats))))
    print(f"{findings.host.device_name}, {findings.host.devices}\n")
    print_table(make_console(), rows)
    print()
    if crowding(findings):
        print(f"busy       {crowding(findings)}")
    if findings.num_processes == 1:
        print("links      not measured: they need two processes or more (--processes)")
    elif findings.inter is None:
        print("hosts      there is one, so nothing was measured between hosts; torchrun on several does that")
    if cluster.cores_per_node:
        shared = f"{count(cluster.devices_per_node, 'process')} on {count(cluster.cores_per_node, 'core')}"
        print(f"node       {shared}; predictions place more of them on further nodes, unless --processes is larger")
    named = path if names_file(str(path)) else f"./{path}"  # not a name of the catalog
    print(f"cluster    {path}, in {findings.seconds:.0f} s")
    print(f"use it     pipeloom simulate RUN.toml --machine.cluster {quoted(named)}")
