"""Runs a job on all ranks: in worker processes that it starts, or in this process as one rank of a launcher."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint, is_hugging_face, read_tokenizer
from pipeloom.config import RunConfig, with_demo_hyperparameters
from pipeloom.config.problems import vocabulary_problems
from pipeloom.cost.partition import default_partition, fastest_partition
from pipeloom.data.prepared import given_tokenizer
from pipeloom.data.text import Data, Whole, load_data, load_whole
from pipeloom.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from
from pipeloom.errors import UserError
from pipeloom.execute.processes.signals import ended_at_once
from pipeloom.execute.processes.workers import are_forked, run_workers
from pipeloom.execute.processes.world import (
    World,
    is_first,
    is_launched,
    join_forked,
    join_launched,
    launched_size,
    num_processes_here,
)
from pipeloom.families import FAMILIES
from pipeloom.measure.host import num_devices
from pipeloom.model.adapted import piece_parameters
from pipeloom.model.graph_breaks import keep_compiler_unloaded
from pipeloom.training.slices import with_known_slices
from pipeloom.training.stages import piece_bytes

Job = Callable[[RunConfig, World, Any], Any]
"""Work of one rank; takes the resolved configuration, and what was loaded."""


class Tokens(NamedTuple):
    """The tokenizer of a trained model, in place of ``Data`` for work that reads no text."""

    tokenizer: Tokenizer


class Texts(NamedTuple):
    """Several texts with one tokenizer."""

    tokenizer: Tokenizer
    texts: tuple[Data, ...]


Loaded = Data | Whole | Tokens | Texts
"""What a job reads."""

_LAUNCHED_PATIENCE_S = 1800.0
"""Under a launcher, ranks may wait this long for another host that tokenizes its text."""

_STOPPED_S = 1.0
"""Added to ``training.stall_timeout_s`` for processes that are stopped, so that ranks that wait report first."""
_RANK_0_PATIENCE_S = 1800.0
"""The other ranks may wait this long for rank 0, which compiles, or measures token slices."""


def run_on_all_ranks(
    config: RunConfig, job: Job, patience_s: float = 30.0, load: Callable[[RunConfig], Loaded] | None = None
) -> Any:
    """Run ``job`` on every rank.

    Args:
        config: valid; not resolved yet. Under a launcher all ranks use the checkpoint that rank 0 chose.
        job: picklable where processes cannot be forked.
        patience_s: added to ``training.stall_timeout_s`` for the timeout of communication outside the pipeline; more
            than the longest work of one rank that others wait for.
        load: of the data that the job takes, on every rank; ``None`` for ``load_text``.

    Returns:
        Rank 0's result; under a launcher, this rank's.

    Raises:
        WorkerError: a worker process failed.
        Interrupted: a signal ended the run.
    """
    if not config.training.compile:
        keep_compiler_unloaded()
    if long_start(config) is not None:
        patience_s += _RANK_0_PATIENCE_S
    stall_s, threads = config.training.stall_timeout_s, config.training.threads
    if is_launched():
        # Overrides the launcher: torchrun sets OMP_NUM_THREADS to 1.
        torch.set_num_threads(threads)
        # Each host may have its own cache folder, and then has to tokenize the text itself.
        # Where rank 0 exits before it joins, the launcher sends SIGTERM to the others, which wait in a library. Rank 0
        # has drafts of files to remove, so signals raise there.
        with nullcontext() if is_first() else ended_at_once():
            world = join_launched(config.training.device, stall_s + max(patience_s, _LAUNCHED_PATIENCE_S))
        return _work(config, job, world, load or load_text)
    # Imported before the fork, once instead of once in every worker.
    needed = [*config.optimizer.rule.imports]
    if config.training.compile:
        needed.append(
            "torch._inductor.compile_fx" if config.training.compile_backend == "inductor" else "torch._dynamo"
        )
    for name in needed:
        import_module(name)
    work = partial(_work_forked, config, job, timeout_s=stall_s + patience_s, load=load or load_text)
    grace_s, stopped_s = config.checkpoint.grace_s, stall_s + _STOPPED_S
    return run_workers(work, config.layout.num_ranks, threads, grace_s=grace_s, stopped_s=stopped_s)[0]


def long_start(config: RunConfig) -> str | None:
    """Work that may take rank 0 minutes before the first step; ``None`` without any. Slices are not compiled."""
    if config.training.compile:
        return "compiling"
    return "measuring token slices" if config.layout.token_slices == "auto" else None


def shared_cores(config: RunConfig) -> int | None:
    """Cores of this host, if more processes of the run compute on them; else ``None``."""
    cores = num_devices("cpu")
    return cores if config.training.device == "cpu" and cores < num_processes_here(config.layout.num_ranks) else None


def check_processes(config: RunConfig) -> None:
    """Refuse a launcher whose number of processes differs from the layout's, and too few CUDA devices.

    Raises:
        UserError: names both numbers.
    """
    num_here = num_processes_here(launched_size() if is_launched() else config.layout.num_ranks)
    found = torch.cuda.device_count() if config.training.device == "cuda" else num_here
    if found < num_here:
        raise UserError(
            f"training.device cuda takes one CUDA device for each of {num_here} processes on a host, found "
            f"{found}; start the run on several hosts (`pipeloom launch` writes what does), use a smaller "
            "layout.pp, layout.dp or layout.tp, or training.device cpu"
        )
    if is_launched() and launched_size() != config.layout.num_ranks:
        raise UserError(
            f"{config.layout.axes.product('layout.')} needs "
            f"{config.layout.num_ranks} processes, the launcher started {launched_size()}; change --layout.pp, "
            "--layout.dp, --layout.tp or the number of processes"
        )


def load_text(config: RunConfig) -> Data:
    """The data of a run, with the tokenizer of the checkpoint that it starts from.

    Raises:
        UserError: as ``load_data``; or the checkpoint's tokenizer cannot be read.
    """
    return load_data(config.data, config.training.seed, _stored_tokenizer(config))


def loaded(data: Data, *, is_again: bool) -> Callable[[RunConfig], Data]:
    """What gives the ranks the data that this process has loaded.

    Args:
        data: of the run.
        is_again: whether the run was started before: the checkpoint that had the tokenizer may be lost.
    """
    if is_launched() or are_forked():  # this process is the rank, or the rank a copy of it: nothing is opened again
        return partial(_same, data)
    return partial(_load_text_with, data.tokenizer.files()) if is_again else load_text


def _same(data: Data, _config: RunConfig) -> Data:
    return data


def _load_text_with(files: dict[str, str], config: RunConfig) -> Data:
    return load_data(config.data, config.training.seed, files)


def load_whole_text(config: RunConfig) -> Whole:
    """All tokens of a text, otherwise as ``load_text``."""
    return load_whole(config.data, _stored_tokenizer(config))


def _stored_tokenizer(config: RunConfig) -> dict[str, str] | None:
    start = config.checkpoint.start
    return None if start is None or is_hugging_face(start) else read_tokenizer(find_checkpoint(start))


def resolve_early(config: RunConfig) -> RunConfig | None:
    """``resolve`` before the text is read; ``None`` for a run whose tokenizer is trained on the text.

    Raises:
        UserError: as ``resolve``; or the tokenizer cannot be read.
    """
    tokenizer = given_tokenizer(config.data, _stored_tokenizer(config))
    if tokenizer is None and config.data.tokenizer_kind == "bytes":
        tokenizer = ByteTokenizer()
    return None if tokenizer is None else _resolve(config, tokenizer.vocab_size)


def load_tokens(config: RunConfig) -> Tokens:
    """The tokenizer of the weights that a configuration starts from, without a text.

    Raises:
        UserError: it cannot be read, or there is none.
    """
    path = config.checkpoint.start
    assert path is not None
    if is_hugging_face(path):
        if config.data.tokenizer == "bpe":
            raise UserError(
                f"data.tokenizer bpe is trained on a text, found none beside {path}; set it to the tokenizer of the "
                "weights: a tokenizer.json, a folder with one, or bytes"
            )
        return Tokens(given_tokenizer(config.data, None) or ByteTokenizer())
    stored = read_tokenizer(path)
    if stored is None:
        raise UserError(f"the checkpoint {path} has no tokenizer; it is of an older version")
    return Tokens(given_tokenizer(config.data, stored) or tokenizer_from(stored))


def resolve(config: RunConfig, data: Loaded) -> RunConfig:
    """Fill in all derived settings: sizes of the model, partition, group size, dtype.

    Raises:
        UserError: the model's vocabulary is smaller than the tokenizer's.
    """
    return _resolve(config, data.tokenizer.vocab_size)


def _resolve(config: RunConfig, needed: int) -> RunConfig:
    for problem in vocabulary_problems(config, needed):
        raise UserError(problem)
    config = with_demo_hyperparameters(config)
    model = config.model.resolve(needed)
    layout, schedule = config.layout, config.schedule
    config = replace(
        config,
        model=model,
        # the size of the tokenizer in use, so that the run folder records it
        data=replace(config.data, bpe_vocab_size=needed) if config.data.tokenizer == "bpe" else config.data,
        training=replace(config.training, dtype=config.training.known_dtype),
    )
    if layout.is_automatic:  # on which partition and family depend
        return config
    recompute = layout.recompute_by_layer(model.num_layers)
    # With a device budget the largest stage decides what fits, so the partition balances bytes instead of seconds.
    if config.swaps_stages and layout.partition is None:
        partition = fastest_partition(piece_bytes(config), config.choice().placed())
    elif model.adapted is not None:
        partition = layout.partition or fastest_partition(piece_parameters(model.adapted), config.choice().placed())
    else:
        partition = layout.partition or default_partition(
            model,
            config.data.seq_len,
            config.choice().placed(),
            recompute,
            frozen_pieces=config.frozen_pieces,
            adapter=config.pairs,
        )
    if schedule.file is None:  # whose order has no family where it was written by hand
        schedule = replace(schedule, family=config.family)
    if FAMILIES[config.family].is_grouped:
        schedule = replace(schedule, group_size=schedule.group_size or config.choice().known_group_size)
    return replace(
        config,
        layout=replace(layout, loops=layout.num_loops, partition=partition),
        schedule=schedule,
    )


def _work_forked(
    config: RunConfig,
    job: Job,
    rendezvous: Path,
    rank: int,
    num_ranks: int,
    *,
    timeout_s: float,
    load: Callable[[RunConfig], Loaded],
) -> Any:
    return _work(config, job, join_forked(rendezvous, rank, num_ranks, config.training.device, timeout_s), load)


def _work(config: RunConfig, job: Job, world: World, load: Callable[[RunConfig], Loaded]) -> Any:
    # One rank chooses the checkpoint: others could find another newest one, and would hash its files once more.
    first = config.checkpoint.init, config.checkpoint.resume, config.layout, config.schedule.family
    init, resume, layout, family = world.from_first(first)
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, init=init, resume=resume),
        # those of the checkpoint's run, in place of auto
        layout=layout,
        schedule=replace(config.schedule, family=family),
    )
    data = load(config)
    result = job(with_known_slices(resolve(config, data), world), world, data)
    # After success only: a rank that failed must exit at once, so that the others stop.
    world.leave()
    return result
