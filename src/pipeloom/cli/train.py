"""``pipeloom train``: text in, trained model, metrics and timeline out."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.cli.run_config import parse_run_config
from pipeloom.config import RunConfig
from pipeloom.errors import UserError

if TYPE_CHECKING:
    from pipeloom.execute.world import World
    from pipeloom.train.trainer import RunSummary

_SUMMARY = "Train a language model with a pipeline of processes."


def run(words: list[str]) -> int:
    """Parse the configuration, then train with own processes or with those of a launcher."""
    config = parse_run_config(words, "train", _SUMMARY)
    from pipeloom.execute.world import is_launched

    if is_launched():
        return _run_launched(config)
    return _run_here(config)


def _run_here(config: RunConfig) -> int:
    from pipeloom.execute.launch import run_workers
    from pipeloom.train.data import load_data
    from pipeloom.train.run_folder import make_run_folder

    _announce(config)
    data = load_data(config.data, config.training.seed)
    print(f"text       {data.description}")
    from pipeloom.train.trainer import resolved

    config = resolved(config, data)
    folder = make_run_folder(config)
    print(f"run        {folder}\n", flush=True)
    _preload()
    try:
        summaries = run_workers(partial(_work, config, folder), config.layout.num_ranks, config.training.threads)
    except BaseException:
        print(f"\nThe run ended early. What it wrote until then is in {folder}.", flush=True)
        raise
    _print_end(summaries[0], folder)
    return 0


def _run_launched(config: RunConfig) -> int:
    """Run as one of the processes that a launcher started."""
    import torch

    from pipeloom.execute.world import join_launched, launched_size
    from pipeloom.train.run_folder import make_run_folder

    if launched_size() != config.layout.num_ranks:
        raise UserError(
            f"layout.pp {config.layout.pp} needs {config.layout.num_ranks} processes, the launcher started "
            f"{launched_size()}; change --layout.pp or the number of processes"
        )
    torch.set_num_threads(config.training.threads)
    world = join_launched(config.training.device, config.training.stall_timeout_s + 30)
    from pipeloom.train.data import load_data
    from pipeloom.train.trainer import Trainer, resolved

    data = load_data(config.data, config.training.seed)
    config = resolved(config, data)
    folder = Path()
    if world.rank == 0:
        _announce(config)
        folder = make_run_folder(config)
        print(f"text       {data.description}\nrun        {folder}\n", flush=True)
    summary = Trainer(config, world, data, folder).run()
    if world.rank == 0:
        _print_end(summary, folder)
    world.leave()
    return 0


def _work(config: RunConfig, folder: Path, rendezvous: Path, rank: int, num_ranks: int) -> "RunSummary":
    """What each of the own processes does."""
    from pipeloom.execute.world import join_forked
    from pipeloom.train.data import load_data
    from pipeloom.train.trainer import Trainer

    timeout_s = config.training.stall_timeout_s + 30
    world: World = join_forked(rendezvous, rank, num_ranks, config.training.device, timeout_s)
    data = load_data(config.data, config.training.seed)
    summary = Trainer(config, world, data, folder).run()
    world.leave()
    return summary


def _preload() -> None:
    """Import what every worker needs before they are forked: once instead of once for each."""
    import torch._dynamo  # noqa: F401  optimizers import it on first use

    import pipeloom.train.trainer  # noqa: F401


def _announce(config: RunConfig) -> None:
    layout, schedule = config.layout, config.schedule
    print(
        f"pipeline   {layout.pp} processes x {layout.loops} stages each, {schedule.family} ({schedule.placement})\n"
        f"batch      {layout.num_microbatches} micro-batches of {layout.microbatch_size} sequences of "
        f"{config.data.seq_len} tokens",
        flush=True,
    )


def _print_end(summary: "RunSummary", folder: Path) -> None:
    from pipeloom.train import run_folder as names

    sample = folder / names.SAMPLE
    if sample.exists():
        print(f"\nsample\n{_indented(sample.read_text(encoding='utf-8'))}")
    print(f"\nparameters        {summary.num_parameters:,}")
    print(f"step time         {summary.step_time_s * 1e3:.0f} ms (median), {summary.tokens_per_s:,.0f} tokens/s")
    print(f"training loss     {summary.train_loss:.4f} nats per token after {summary.steps} steps")
    if summary.validation_loss is not None:
        print(f"validation loss   {summary.validation_loss:.4f}")
    print(f"unigram loss      {summary.unigram_loss:.4f} (a model that knows only how frequent each token is)")
    print(f"\nwritten to {folder}:")
    described = {
        names.CONFIG: "the complete configuration; `pipeloom train` runs it again",
        names.METRICS: "a line for each step",
        names.SCHEDULE: "what each rank did, in order",
        f"{names.TIMELINE}.png, .svg": "the traced step as a picture",
        names.TRACE: "the traced step for ui.perfetto.dev",
        names.SAMPLE: "text from the model",
        names.SUMMARY: "these numbers",
    }
    for name, what in described.items():
        print(f"  {name:<20} {what}")


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
