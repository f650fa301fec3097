"""``pipeloom train``: text in, trained model, metrics and timeline out."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.cli.run_config import parse_run_config
from pipeloom.config import RunConfig

if TYPE_CHECKING:
    from pipeloom.execute.world import World
    from pipeloom.train.data import Data
    from pipeloom.train.trainer import RunSummary

_SUMMARY = "Train a language model with a pipeline of processes."


def run(words: list[str]) -> int:
    """Parse the configuration, then train with own processes or with those of a launcher."""
    config = parse_run_config(words, "train", _SUMMARY)
    from pipeloom.execute.world import is_first
    from pipeloom.train.data import load_data
    from pipeloom.train.progress import restore_terminal
    from pipeloom.train.run_folder import make_run_folder
    from pipeloom.train.session import resolve, run_on_all_ranks

    if not is_first():
        run_on_all_ranks(config, partial(_train, Path()))
        return 0
    _announce(config)
    data = load_data(config.data, config.training.seed)
    folder = make_run_folder(resolve(config, data))
    print(f"text       {data.description}\nrun        {folder}\n", flush=True)
    try:
        summary = run_on_all_ranks(config, partial(_train, folder))
    except BaseException:
        restore_terminal()
        print(f"\nThe run ended early. What it wrote until then is in {folder}.", flush=True)
        raise
    _print_end(summary, folder)
    return 0


def _train(folder: Path, config: RunConfig, world: "World", data: "Data") -> "RunSummary":
    """What each rank does."""
    from pipeloom.train.trainer import Trainer

    return Trainer(config, world, data, folder).run()


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
    if summary.predicted_step_time_s is not None:
        ratio = summary.predicted_step_time_s / summary.step_time_s
        print(
            f"predicted         {summary.predicted_step_time_s * 1e3:.0f} ms before the first step, {ratio:.2f} of that"
        )
    print(f"training loss     {summary.train_loss:.4f} nats per token after {summary.steps} steps")
    if summary.validation_loss is not None:
        print(f"validation loss   {summary.validation_loss:.4f}")
    print(f"unigram loss      {summary.unigram_loss:.4f} (a model that knows only how frequent each token is)")
    print(f"\nwritten to {folder}:")
    described = {
        names.CONFIG: "the complete configuration; `pipeloom train` runs it again",
        names.METRICS: "a line for each step",
        names.SCHEDULE: "what each rank did, in order",
        f"{names.TIMELINE}.png, .svg": "the traced step as a picture, measured and predicted",
        names.TRACE: "the traced step for ui.perfetto.dev",
        names.PREDICTED_TRACE: "the same as predicted",
        names.SAMPLE: "text from the model",
        names.SUMMARY: "these numbers",
    }
    for name, what in described.items():
        if "," in name or (folder / name).exists():
            print(f"  {name:<21} {what}")


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
