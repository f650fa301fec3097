"""``pipeloom train``: text in, trained model, metrics and timeline out."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.checkpoint.checkpoint_choice import Choice, choose_checkpoint, refuse_steps
from pipeloom.checkpoint.checkpoint_folder import FOLDER, TOKENIZER, UNCHECKED, can_be_checked, name_of, read_info
from pipeloom.cli.reference import Command
from pipeloom.cli.run_config import TRAINING, other_axes, parse_config
from pipeloom.config import RunConfig, find_problems, hyperparameter_problems
from pipeloom.predict.describe import why_training_may_differ
from pipeloom.schedule import Kind
from pipeloom.terminal.words import count, format_bytes, passes_of

if TYPE_CHECKING:
    from pipeloom.data.text import Data
    from pipeloom.execute.processes.world import World
    from pipeloom.runs.run_folder import RunFolder
    from pipeloom.training.trainer import RunResult, RunSummary

COMMAND = Command(
    name="train",
    options=RunConfig,
    examples={
        "pipeloom train": "the demo: a small model on four processes",
        "pipeloom train --data.path notes.txt --layout.pp 2 --training.steps 500": "on a text of yours",
        "pipeloom train run.toml --checkpoint.resume outputs/demo": "a run file, from a checkpoint",
    },
    settings=TRAINING,
)


def run(words: list[str]) -> int:
    """Parse the configuration, then train with own processes or with those of a launcher."""
    config = parse_config(COMMAND, words, _problems)
    from pipeloom.execute.processes.world import is_first
    from pipeloom.runs.run_folder import RunFolder
    from pipeloom.runs.run_start import take_run_folder
    from pipeloom.training.memory_check import check_memory
    from pipeloom.training.session import check_processes, run_on_all_ranks

    check_processes(config)
    # Before a folder is made and processes start: a run that cannot fit should leave nothing behind.
    check_memory(config)
    if not is_first():
        # Other ranks of a launcher write no file, so their folder is never used.
        run_on_all_ranks(config, partial(_train, RunFolder(Path())))
        return 0
    _announce(config)
    with take_run_folder(config) as lock:
        if not lock.is_kept:
            print(f"not locked {lock.folder}: its file system has no locks; no other host may train into it")
        _run_in(lock.folder, config)
    return 0


def _run_in(path: Path, config: RunConfig) -> None:
    """The run from start to end, in a folder that this process has locked."""
    from pipeloom.execute.processes.signals import raised_signals
    from pipeloom.runs.run_start import draft_start
    from pipeloom.terminal.progress import restore_terminal
    from pipeloom.training.checkpoints.saving import safe_steps
    from pipeloom.training.session import load_text, long_start, resolve, run_on_all_ranks

    choice = None if config.checkpoint.resume is None else choose_checkpoint(config.checkpoint.resume)
    if choice is not None:
        refuse_steps(choice, config.training.known_steps, path)
        config = replace(config, checkpoint=replace(config.checkpoint, resume=choice.path))
    # Here, before the processes: one tokenizes, and all of them find the text in the cache.
    data = load_text(config)
    resolved = resolve(config, data)
    goes_on = _check_checkpoint(resolved, data, choice) + _unused_size(config, data, choice)
    # Everything that can be refused is refused before the run has drafts in its folder.
    moved = _check_schedule(resolved)
    folder = draft_start(path, resolved)
    if folder.damaged:
        goes_on += f"\n           after the first step, {', '.join(folder.damaged)} will be called *.damaged"
    print(f"text       {data.description}{moved}\nrun        {path}{goes_on}", flush=True)
    has_steps = choice is None or read_info(choice.path).step < resolved.training.known_steps
    slow = long_start(config)
    patience = "; the first step takes a few seconds" if slow is None else f"; {slow} may take minutes"
    print(f"starting   {count(config.layout.num_ranks, 'process')}{patience if has_steps else ''}\n", flush=True)
    try:
        result = run_on_all_ranks(config, partial(_train, folder))
        # The ranks have ended, and with them the handling of signals; what this process writes must still end in order.
        with raised_signals():
            _write_end(config, path, result)
    except BaseException as error:
        # The bar may have hidden the cursor in a process that was killed.
        restore_terminal(sys.stdout)
        error.add_note(safe_steps(resolved, folder))
        raise
    _print_end(result.summary, path)


def _problems(config: RunConfig, *, is_model_known: bool) -> list[str]:
    recipe = hyperparameter_problems(config) if is_model_known else []  # what is unset depends on the model's file
    return [*find_problems(config, is_model_known=is_model_known), *recipe]


def _write_end(config: RunConfig, folder: Path, result: "RunResult") -> None:
    """What one process writes when all ranks are done."""
    from pipeloom.report import write_report
    from pipeloom.training.export import export

    _draw(config, folder, result)
    if config.checkpoint.final == "safetensors":
        export(folder / FOLDER / name_of(result.summary.steps), folder)
    write_report(folder)


def _check_checkpoint(config: RunConfig, data: "Data", choice: Choice | None) -> str:
    """Refuse a checkpoint of another model; else lines about how the run goes on, empty without checkpoint."""
    if choice is None:
        return ""
    from pipeloom.training.checkpoints.checkpoint import check_resumable, new_order

    check_resumable(config)
    info = read_info(choice.path)
    line = f"\nresume     {choice.path}: step {info.step}, {info.tokens:,} tokens"
    if info.step == config.training.known_steps:
        line += "; all steps are done, only the end of the run is left"
    line += "" if can_be_checked(choice.path) else f"\n           {UNCHECKED}"
    line += "".join(f"\n           not from {path.name}: {problem}" for path, problem in choice.damaged)
    changed = new_order(config, data, info)
    return (
        f"{line}\n           other batches than its run would have read, since {', '.join(changed)} changed"
        if changed
        else line
    )


def _unused_size(config: RunConfig, data: "Data", choice: Choice | None) -> str:
    """A line where the checkpoint's tokenizer has another size than was set; the resolved run has the size it uses."""
    wanted, used = config.data.bpe_vocab_size, data.tokenizer.vocab_size
    if choice is None or config.data.known_tokenizer != "bpe" or wanted == used:
        return ""
    return f"\n           with the {used:,} tokens of its own tokenizer; data.bpe_vocab_size {wanted:,} has no effect"


_MOVED = {"evicted": Kind.EVICT, "offloaded": Kind.OFFLOAD, "recomputed": Kind.RECOMPUTE, "swapped in": Kind.SWAP_IN}


def _check_schedule(config: RunConfig) -> str:
    """Refuse a family with a mistake, a schedule file that does not fit, and budgets that cannot be kept.

    All of that before the run has a folder.

    Returns:
        A line about what the schedule moves; empty if nothing may move.
    """
    schedule = config.schedule
    may_move = schedule.balance or schedule.offload or schedule.keep is not None or schedule.budget_bytes is not None
    may_move = may_move or schedule.file is not None
    # The lengths of automatic slices are measured later, on rank 0; a schedule of other slices would mislead.
    if not may_move or config.layout.token_slices == "auto":
        config.choice().make()
        return ""
    from pipeloom.training.pipeline import training_schedule

    rows = training_schedule(config).rows
    counts = {name: [int(row.is_kind(kind).sum()) for row in rows] for name, kind in _MOVED.items()}
    counted = [f"{' '.join(map(str, by_rank))} {name}" for name, by_rank in counts.items() if any(by_rank)]
    return f"\nmoves      {', '.join(counted) or 'nothing'} (by pipeline rank, in a step)"


def _draw(config: RunConfig, folder: Path, result: "RunResult") -> None:
    from pipeloom.plotting.draw import plot_timelines
    from pipeloom.runs.run_folder import TIMELINE

    if result.measured is None:
        return
    layout = config.layout
    what = (
        f"{count(layout.num_stages, 'stage')} on {count(layout.pp, 'pipeline rank')}, "
        f"{count(layout.num_microbatches, 'micro-batch')}{_cut(config)}{_passes(config)}"
    )
    step = result.summary.traced_step
    panels = {f"{config.schedule.title}, measured in step {step}: {what}": result.measured}
    if result.predicted is not None:
        panels["predicted before the first step, from profiled stages"] = result.predicted
    plot_timelines(panels, [folder / f"{TIMELINE}.{ending}" for ending in ("png", "svg")], unit="ms", scale=1e3)


def _train(folder: "RunFolder", config: RunConfig, world: "World", data: "Data") -> "RunResult":
    """What each rank does."""
    from pipeloom.training.trainer import Trainer

    return Trainer(config, world, data, folder).run()


def _announce(config: RunConfig) -> None:
    from pipeloom.execute.processes.world import is_launched
    from pipeloom.measure.host import num_devices

    layout, schedule, training = config.layout, config.schedule, config.training
    default = "" if training.dtype else f" (the default on {'GPUs' if training.device == 'cuda' else 'CPUs'})"
    lines = {
        "pipeline": f"{schedule.title}: {count(layout.pp, 'pipeline rank')} x {count(layout.loops, 'stage')} each, "
        f"{config.choice().placement_name}{_passes(config)}{other_axes(config)}",
        "batch": f"{count(layout.num_microbatches, 'micro-batch')} of {count(layout.microbatch_size, 'sequence')} of "
        f"{count(config.data.seq_len, 'token')}{_cut(config)}",
        "dtype": f"{training.known_dtype}{default}",
    }
    is_here = training.device == "cpu" and not is_launched()
    if is_here and (cores := num_devices("cpu")) < layout.num_ranks:
        several = "`pipeloom launch` writes what starts them on several hosts"
        lines["host"] = f"{count(layout.num_ranks, 'process')} share {count(cores, 'core')}; {several}"
    if (may_differ := why_training_may_differ(config)) is not None:
        lines["note"] = may_differ
    if schedule.budget_bytes is not None:
        home = "memory of the host" if schedule.swap_folder is None else f"files in {schedule.swap_folder}"
        lines["stages"] = f"at rest in {home}; on the device at most {format_bytes(schedule.budget_bytes)} of them"
    for name, text in lines.items():
        print(f"{name:<11}{text}", flush=True)


def _passes(config: RunConfig) -> str:
    schedule = config.schedule
    return passes_of(schedule.keep, balance=schedule.balance, offload=schedule.offload)


def _cut(config: RunConfig) -> str:
    """Token slices; nothing without them."""
    if config.layout.token_slices == "auto":
        return ", in slices that suit this machine"
    return f", in {count(config.layout.num_slices, 'slice')}" if config.layout.num_slices > 1 else ""


def _print_end(summary: "RunSummary", folder: Path) -> None:
    from pipeloom.runs import run_folder as names

    sample = folder / names.SAMPLE
    if sample.exists():
        text = sample.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        print("\nsample\n" + "\n".join(f"  | {line}" for line in text))
    print()
    for name, text in _results(summary).items():
        print(f"{name:<18}{text}")
    print(f"\nwritten to {folder}:")
    described = {
        names.CONFIG: f"the complete configuration; `pipeloom train {folder / names.CONFIG}` runs it again",
        names.METRICS: "a line for each step",
        names.WARNINGS: "checkpoints that could not be written",
        names.SCHEDULE: "what each rank did, in order",
        f"{names.TIMELINE}.png, .svg": "the traced step as a picture, measured and predicted",
        names.TRACE: "the traced step for ui.perfetto.dev",
        names.OTHER_TRACES: "the same of the other pipelines, which the report compares",
        names.PREDICTED_TRACE: "the same as predicted",
        TOKENIZER: "text to tokens and back, for the tokenizers library",
        names.SAMPLE: "text from the model",
        names.SUMMARY: "these numbers",
        "checkpoints": f"its state; `--checkpoint.resume {folder}` goes on, with any layout",
        names.WEIGHTS: "the weights",
        names.WEIGHTS_INDEX: "the weights; which parameter is in which file",
        names.REPORT: "all of it as one page; open it in a browser",
    }
    for name, what in described.items():
        if "," in name or any(folder.glob(name)):  # some may be switched off
            print(f"  {name:<21} {what}")


def _results(summary: "RunSummary") -> dict[str, str]:
    """What steps took and held, and what the model learned."""
    step_s, predicted_s, bubble = summary.step_time_s, summary.predicted_step_time_s, summary.bubble_fraction
    lines = {"parameters": f"{summary.num_parameters:,}"}
    if step_s is None or summary.tokens_per_s is None:
        lines["step time"] = "not measured: all steps were done before, with other settings or in another folder"
    else:
        lines["step time"] = f"{step_s * 1e3:.0f} ms (median), {summary.tokens_per_s:,.0f} tokens/s"
    if predicted_s is not None and step_s is not None:
        lines["predicted"] = f"{predicted_s * 1e3:.0f} ms before the first step, {predicted_s / step_s:.2f} of that"
    if summary.exchange_s is not None:
        lines["exchanges"] = f"{summary.exchange_s * 1e3:.0f} ms of a rank's traced step, of tensor parallelism"
    if any(summary.live_bytes):
        held = ", ".join(f"{nbytes / 1e6:,.1f}" for nbytes in summary.live_bytes)
        lines["for backwards"] = f"{held} MB at most, by pipeline rank"
    if bubble is not None:
        predicted = summary.predicted_bubble_fraction
        also = "" if predicted is None else f", {predicted:.0%} predicted"
        lines["bubble"] = f"{bubble:.0%} of the ranks' time in the traced step{also}"
    if summary.peak_stage_bytes is not None and summary.swap_s is not None and summary.swap_hidden_s is not None:
        hidden = f"{summary.swap_hidden_s / summary.swap_s:.0%} of them hidden" if summary.swap_s else "nothing to hide"
        lines["swapped stages"] = f"{summary.swap_s * 1e3:.0f} ms on their way in the traced step, {hidden}"
        lines[""] = f"at most {format_bytes(summary.peak_stage_bytes)} of them on the device"
    if summary.train_loss is not None:
        lines["training loss"] = f"{summary.train_loss:.4f} nats per token in step {summary.steps}"
    if summary.validation_loss is not None:
        lines["validation loss"] = f"{summary.validation_loss:.4f}"
    return lines | {"unigram loss": f"{summary.unigram_loss:.4f} (a model of token frequencies alone)"}
