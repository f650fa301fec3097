"""A training run from start to end: checks, run folder, processes, results."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import isclose
from pathlib import Path

from pipeloom.calls import checked
from pipeloom.checkpoint.checkpoint_choice import Choice, choose_checkpoint, refuse_steps
from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    UNCHECKED,
    can_be_checked,
    is_hugging_face,
    name_of,
    read_info,
    run_of,
)
from pipeloom.config import RunConfig, training_problems
from pipeloom.config.file import read_run_file
from pipeloom.config.run import value_of
from pipeloom.data.text import Data
from pipeloom.errors import ConfigError, Interrupted, RunError, UserError, WorkerError
from pipeloom.execute.processes.world import World, is_first, is_launched
from pipeloom.predict.describe import completed, why_training_may_differ
from pipeloom.runs.hang_words import blocked_by
from pipeloom.runs.run_folder import CONFIG, METRICS, TIMELINE, Failed, RunFolder
from pipeloom.runs.run_start import draft_start, take_run_folder
from pipeloom.schedule import Kind
from pipeloom.system.end_signals import raised_signals
from pipeloom.terminal.console import hanging
from pipeloom.terminal.guard import print_beside
from pipeloom.terminal.progress import restore_terminal
from pipeloom.terminal.words import count, format_bytes, passes_of
from pipeloom.training.adapted import with_adapted_check
from pipeloom.training.again import NEVER, Again, Restarts, refuse_launched
from pipeloom.training.automatic.interleaving import with_chosen_loops
from pipeloom.training.checkpoints.contents import HELD_OUT, check_resumable, new_order, step_size_of
from pipeloom.training.checkpoints.saving import safe_steps
from pipeloom.training.memory_check import check_kept, check_memory
from pipeloom.training.optimizers.optimizer import learning_rate
from pipeloom.training.pretrained import check_init
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import (
    check_processes,
    load_text,
    loaded,
    long_start,
    resolve,
    resolve_early,
    run_on_all_ranks,
    shared_cores,
)
from pipeloom.training.trainer import RunResult, Trainer


@checked
def train(config: RunConfig, *, quiet: bool = False) -> RunResult:
    """Train a language model with pipeline parallelism. Starts the processes of the run and waits for them.

    Under a launcher such as torchrun, this process is one of the ranks.

    Examples:
        >>> from pipeloom import load_run, train
        >>> run = load_run(layout={"pp": 2, "loops": 2}, training={"steps": 20})
        >>> result = train(run)  # doctest: +SKIP
        >>> result.summary.train_loss, result.folder  # doctest: +SKIP
        (3.0813, PosixPath('outputs/2026-01-31-101500'))

    Args:
        config: of the run, from ``load_run``.
        quiet: whether to print neither the configuration nor losses.

    Returns:
        Summary, folder and traces of the run; under a launcher, complete on rank 0.

    Raises:
        ConfigError: lists all problems of the configuration.
        UserError: the run cannot start, because of its text, folder, checkpoint or schedule, or the host.
        RunError: the run failed; checkpoints written before remain.
        Interrupted: a signal ended the run.
    """
    begun_s = time.monotonic()
    config, problems = completed(config, with_adapted_check(training_problems))
    if problems:
        raise ConfigError(problems, "the run")
    print_line = _print_nothing if quiet else _print_line
    check_processes(config)
    refuse_launched(config)
    # Before a folder is created: a run that cannot fit leaves nothing behind.
    check_memory(config)
    check_kept(config)
    if not is_first():
        # Other ranks of a launcher write no file, so their folder is never used.
        return run_on_all_ranks(config, partial(_train, folder=RunFolder(Path()), quiet=quiet, begun_s=begun_s))
    _announce(config, print_line)
    with take_run_folder(config) as lock:
        if not lock.is_kept:
            print_line(f"not locked {lock.folder}: its file system has no locks; no other host may train into it")
        return _run_in(lock.folder, config, print_line, begun_s, quiet=quiet)


_PrintLine = Callable[[str], None]
_INDENT = 11
"""Characters before the texts of start messages."""


def _print_line(text: str) -> None:
    print_beside(hanging(text, _INDENT), sys.stdout)


def _print_nothing(_text: str) -> None:
    pass


def _run_in(path: Path, config: RunConfig, print_line: _PrintLine, begun_s: float, *, quiet: bool) -> RunResult:
    """Run in a folder that this process has locked."""
    choice = None if config.checkpoint.resume is None else choose_checkpoint(config.checkpoint.resume)
    if choice is not None:
        refuse_steps(choice, config.training.known_steps, path)
        config = replace(config, checkpoint=replace(config.checkpoint, resume=choice.path))
        config = _with_earlier_loops(config, choice.path)
    elif (init := config.checkpoint.init) is not None and not is_hugging_face(init):
        config = replace(config, checkpoint=replace(config.checkpoint, init=choose_checkpoint(init).path))
    # Tokenizing may take an hour, so what can be wrong without the text is checked before.
    early = resolve_early(config)
    lines = None if early is None else (_check_start(early, choice), _check_schedule(early))
    # Tokenized once, before the processes start; they read the tokens from the cache.
    data = load_text(config)
    resolved = early or resolve(config, data)
    # All checks come before the run writes into its folder.
    goes_on, moved = lines or (_check_start(resolved, choice), _check_schedule(resolved))
    goes_on += _changed_order(resolved, data, choice) + _unused_size(config, data, choice)
    folder = draft_start(path, resolved)
    goes_on += _changed_rate(resolved, folder, choice)
    goes_on += f"\n           {folder.lost}" if folder.lost else ""
    if folder.damaged:
        goes_on += f"\n           after the first step, {', '.join(folder.damaged)} will be called *.damaged"
    print_line(f"text       {data.description}{_read_again(resolved, data)}{moved}\nrun        {path}{goes_on}")
    has_steps = choice is None or read_info(choice.path).step < resolved.training.known_steps
    slow = long_start(config)
    patience = "; the first step takes a few seconds" if slow is None else f"; {slow} may take minutes"
    print_line(f"starting   {count(config.layout.num_ranks, 'process')}{patience if has_steps else ''}\n")

    def run(config: RunConfig, again: Again) -> RunResult:
        job = partial(_train, folder=folder, quiet=quiet, begun_s=begun_s, again=again)
        try:
            return run_on_all_ranks(config, job, load=loaded(data, is_again=again.is_again))
        except WorkerError as error:
            folder.note_failure(Failed(error.rank if error.is_reason else None, error.ended))
            raise

    try:
        with ExitStack() as stack:
            restarts = Restarts(config, folder, print_line, stack)
            result = restarts.run(run)
        config = restarts.config
        # The ranks, which handled signals, have exited; this process must not be killed while it writes.
        with raised_signals():
            try:
                _write_end(config, path, result)
            except UserError as error:  # such as on a full disk; the input was right
                raise RunError(str(error)) from None
    except BaseException as error:
        # A killed rank may have left the cursor hidden.
        restore_terminal(sys.stdout)
        if isinstance(error, RunError) and (reason := blocked_by(path)):
            error.add_note(reason)
        if isinstance(error, Interrupted):
            folder.note_interruption(str(error))  # ranks have the signal that this process sent them
        error.add_note(safe_steps(resolved, folder))
        raise
    return result


def _with_earlier_loops(config: RunConfig, checkpoint: Path) -> RunConfig:
    """In place of ``layout.loops auto``, number and family that the checkpoint's run chose for as many ranks."""
    run = run_of(checkpoint)
    if not config.layout.is_automatic or run is None or not (run / CONFIG).is_file():
        return config
    earlier, _ = read_run_file(run / CONFIG)
    return config.with_loops_of(earlier)


def _write_end(config: RunConfig, folder: Path, result: RunResult) -> None:
    """Write plots, exported weights and the report, after all ranks have finished."""
    from pipeloom.report import write_report

    if config.layout.is_automatic:
        config, _ = read_run_file(folder / CONFIG)
    _draw(config, folder, result)
    if config.checkpoint.final == "safetensors":
        from pipeloom.training.conversions.export import export_weights  # not before the first step: it loads DCP

        export_weights(folder / FOLDER / name_of(result.summary.steps), folder)
    write_report(folder)


def _check_start(config: RunConfig, choice: Choice | None) -> str:
    """Refuse a checkpoint or weights of another model.

    Returns:
        Lines that describe where the run resumes, or its first weights; empty for random ones.
    """
    if choice is None:
        return "" if config.checkpoint.init is None else f"\nweights    {check_init(config)}"
    check_resumable(config)
    info = read_info(choice.path)
    line = f"\nresume     {choice.path}: step {info.step}, {info.tokens:,} tokens"
    if info.step == config.training.known_steps:
        line += "; all steps are done, only validation, sample and report are left"
    line += "" if can_be_checked(choice.path) else f"\n           {UNCHECKED}"
    return line + "".join(f"\n           {remark}" for remark in choice.remarks)


def _read_again(config: RunConfig, data: Data) -> str:
    """A line if a validation reads windows of its text more than once."""
    batches, windows = config.training.validation_batches, data.validation.num_windows
    read = batches * config.layout.batch_size
    if read <= windows:
        return ""
    times = f"{read // windows:,}" + (f" or {read // windows + 1:,}" if read % windows else "")
    needed = f"{count(batches, 'validation batch')} need {count(read, 'window')}, the validation text has {windows:,}"
    return f"\n           {needed}: each is read {times} times (training.validation_batches)"


def _changed_order(config: RunConfig, data: Data, choice: Choice | None) -> str:
    """Lines if the batches of a resumed run differ from those that its checkpoint's run would have read."""
    if choice is None:
        return ""
    info, lines = read_info(choice.path), list[str]()
    if changed := new_order(config, data, info):
        differ = "batches differ from those that its run would have read"
        lines.append(f"{differ}, since {', '.join(changed)} changed")
    before, after = info.data.get(HELD_OUT), config.data.validation_fraction
    if HELD_OUT in changed and before is not None and after > before:
        lines.append("validation losses may be too low: its run read text for training that is held out now")
    # Other replicas easily change it: micro-batches are counted for each of them.
    own, earlier = config.layout.step_size, step_size_of(info)
    if own != earlier:
        lines.append(f"a step reads {count(own, 'sequence')}, a step of its run read {earlier:,}")
    return "".join(f"\n           {line}" for line in lines)


def _changed_rate(config: RunConfig, folder: RunFolder, choice: Choice | None) -> str:
    """A line if the last step of a resumed run had another learning rate than the settings of this run give it."""
    # No list of lines: a long run has millions.
    line = (folder.read(METRICS) or "").rstrip("\n").rpartition("\n")[2]
    if choice is None or not line:
        return ""
    done, steps, last = read_info(choice.path).step, config.training.known_steps, json.loads(line)
    before, after = last.get("lr"), learning_rate(config.optimizer, done - 1, steps)
    if last["step"] != done or done == steps or not isinstance(before, float) or isclose(before, after, rel_tol=1e-6):
        return ""
    had = f"step {done} had a learning rate of {before:.3g}"
    return f"\n           {had}; these settings give it {after:.3g}, and continue from there"


def _unused_size(config: RunConfig, data: Data, choice: Choice | None) -> str:
    """A line if ``data.bpe_vocab_size`` has no effect because the checkpoint's tokenizer has another size."""
    wanted, used = config.data.bpe_vocab_size, data.tokenizer.vocab_size
    if choice is None or config.data.tokenizer != "bpe" or wanted == used:
        return ""
    return f"\n           with the {used:,} tokens of its own tokenizer; data.bpe_vocab_size {wanted:,} has no effect"


_MOVED = {"evicted": Kind.EVICT, "offloaded": Kind.OFFLOAD, "recomputed": Kind.RECOMPUTE, "swapped in": Kind.SWAP_IN}


def _check_schedule(config: RunConfig) -> str:
    """Refuse an invalid family, a schedule file that does not fit the run, and budgets that cannot be met.

    Returns:
        A line with the number of moves and recomputations; empty if the configuration allows none.
    """
    schedule = config.schedule
    may_move = schedule.balance or schedule.offload or schedule.keep is not None or schedule.budget_bytes is not None
    may_move = may_move or schedule.file is not None
    # Lengths of automatic slices are chosen later, on rank 0, so the final schedule does not exist yet.
    if not may_move or config.layout.token_slices == "auto":
        config.choice().make()
        return ""
    rows = training_schedule(config).rows
    counts = {name: [int(row.is_kind(kind).sum()) for row in rows] for name, kind in _MOVED.items()}
    counted = [f"{' '.join(map(str, by_rank))} {name}" for name, by_rank in counts.items() if any(by_rank)]
    return f"\nmoves      {', '.join(counted) or 'nothing'} (by pipeline rank, in a step)"


def _draw(config: RunConfig, folder: Path, result: RunResult) -> None:
    from pipeloom.plotting.timelines import plot_timelines

    if result.measured is None:
        return
    layout = config.layout
    what = (
        f"{count(layout.num_stages, 'stage')} on {count(layout.pp, 'pipeline rank')}, "
        f"{layout.microbatch_words}{_cut(config)}{_passes(config)}"
    )
    step = result.summary.traced_step
    panels = {f"{config.title}, measured in step {step}: {what}": result.measured}
    if result.predicted is not None:
        panels["predicted before the first step, from profiled stages"] = result.predicted
    plot_timelines(panels, [folder / f"{TIMELINE}.{ending}" for ending in ("png", "svg")], unit="ms", scale=1e3)


def _train(
    config: RunConfig,
    world: World,
    data: Data,
    *,
    folder: RunFolder,
    quiet: bool,
    begun_s: float,
    again: Again = NEVER,
) -> RunResult:
    config = with_chosen_loops(config, world, data, _print_nothing if quiet else _print_line)
    return Trainer(config, world, data, folder, quiet=quiet, begun_s=begun_s, again=again).run()


def _announce(config: RunConfig, print_line: _PrintLine) -> None:
    layout, schedule, training = config.layout, config.schedule, config.training
    default = "" if training.dtype else f" (the default on {'GPUs' if training.device == 'cuda' else 'CPUs'})"
    stages = f"{count(layout.num_loops, 'stage')} each, {config.choice().placement_name}{_passes(config)}"
    order, stages = (schedule.family, "stages to be chosen") if layout.is_automatic else (config.title, stages)
    lines = {
        "pipeline": f"{order}: {count(layout.pp, 'pipeline rank')} x {stages}{layout.other_axes}",
        "batch": f"{layout.microbatch_words} of {count(layout.microbatch_size, 'sequence')} of "
        f"{count(config.data.seq_len, 'token')}{_cut(config)}{_whole_step(config)}",
        "dtype": f"{training.known_dtype}{default}",
    }
    if not is_launched() and (cores := shared_cores(config)) is not None:
        several = "`pipeloom launch` writes start files for several hosts"
        lines["host"] = f"{count(layout.num_ranks, 'process')} share {count(cores, 'core')}; {several}"
    if (may_differ := why_training_may_differ(config)) is not None:
        lines["note"] = may_differ
    rising, steps = config.optimizer.known_lr_warmup_steps, training.known_steps
    if rising > steps:
        # Not a problem: a trial of a few steps of a run file is common.
        reached = f"at most {steps / rising:.0%} of optimizer.lr"
        lines["rate"] = f"{reached}, since optimizer.lr_warmup_steps {rising:,} are more than training.steps {steps:,}"
    if long := [f"{name} {value_of(config, name)}" for name in _PERIODS if (value_of(config, name) or 0) > steps]:
        lines["period"] = f"no effect in this run of {count(steps, 'step')}: {', '.join(long)}"
    if config.checkpoint.start is None and (name := _frozen_by(config)) is not None:
        what = "trains adapters of" if config.adapter.rank is not None else "keeps"
        lines["warning"] = (
            f"{name} {value_of(config, name)} {what} random weights, which stay as they are; start from trained ones "
            f"with --checkpoint.init DIR, or leave {name} out"
        )
    if schedule.budget_bytes is not None:
        home = "memory of the host" if schedule.swap_folder is None else f"files in {schedule.swap_folder}"
        what = "stages" if config.swaps_stages else "experts"
        lines[what] = f"stored in {home}; at most {format_bytes(schedule.budget_bytes)} of them on the device"
    for name, text in lines.items():
        print_line(f"{name:<{_INDENT}}{text}")


_PERIODS = (
    *("training.validate_every", "training.check_every", "training.divide_every"),
    *("checkpoint.every", "checkpoint.keep_every", "restart.keep_every"),
)
"""Settings of which each is a number of steps between two of a kind."""


def _frozen_by(config: RunConfig) -> str | None:
    """The setting that keeps weights as they are; ``None`` if all are trained."""
    names = ("adapter.rank", "training.freeze_layers")
    return next((name for name in names if value_of(config, name) is not None), None)


def _whole_step(config: RunConfig) -> str:
    """Words about the batch of all replicas; empty for one."""
    tokens = config.layout.step_size * config.data.seq_len
    words = config.layout.step_words
    return words and f"{words}, {count(tokens, 'token')} a step"


def _passes(config: RunConfig) -> str:
    schedule = config.schedule
    return passes_of(schedule.keep, balance=schedule.balance, offload=schedule.offload)


def _cut(config: RunConfig) -> str:
    """Words about token slices; empty without them."""
    if config.layout.token_slices == "auto":
        return ", in slices of measured lengths"
    return f", in {count(config.layout.num_slices, 'slice')}" if config.layout.num_slices > 1 else ""
