"""``pipeloom train``: trains a model; writes checkpoints, metrics and a timeline."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.cli.reference import Command
from pipeloom.cli.run_config import TRAINING, parse_words
from pipeloom.config import RunConfig, training_problems
from pipeloom.system.files import read_text
from pipeloom.system.garbage import kept_imports
from pipeloom.terminal.console import hanging
from pipeloom.terminal.words import format_bytes, quoted
from pipeloom.training.adapted import with_adapted_check
from pipeloom.workload.model import shape_of

if TYPE_CHECKING:
    from pipeloom.runs.run_reading import Run
    from pipeloom.training.trainer import RunSummary

COMMAND = Command(
    name="train",
    options=RunConfig,
    examples={
        "pipeloom train": "the demo: four processes",
        "pipeloom train --data.path notes.txt --layout.pp 2": "your own text",
        "pipeloom train --checkpoint.resume outputs/demo": "resume a run",
    },
    settings=TRAINING,
)


def run(words: list[str]) -> int:
    """Parse the configuration, then train with own processes or with those of a launcher."""
    config, file, _, is_resumed = parse_words(COMMAND, words, with_adapted_check(training_problems))
    with kept_imports():
        from pipeloom.execute.processes.world import is_first
        from pipeloom.training.run import train

    if is_resumed and is_first():
        print(f"config     {file}, of the run that is resumed; flags override it", flush=True)
    result = train(config)
    if is_first():
        _print_end(result.summary, result.folder)
    return 0


def _print_end(summary: "RunSummary", folder: Path) -> None:
    from pipeloom.runs import run_folder as names
    from pipeloom.runs.run_reading import read_run

    sample = folder / names.SAMPLE
    if sample.exists():
        print(f"\nsample\n{read_text(sample)}")
    else:
        print()
    run = read_run(folder)
    lines = {"parameters": _parameters(summary.num_parameters, run.config)} | _results(summary, run)
    for name, text in lines.items():
        print(hanging(f"{name:<18}{text}", 18))
    print(f"\nwritten to {folder}:")
    described = {
        names.CONFIG: f"the complete configuration; `pipeloom train {quoted(folder / names.CONFIG)}` runs it again",
        names.METRICS: "a line for each step",
        names.WARNINGS: "what went wrong without ending the run",
        names.SCHEDULE: "what each rank did, in order",
        f"{names.TIMELINE}.png, .svg": "the traced step as a picture, measured and predicted",
        names.TRACE: "the traced step for ui.perfetto.dev",
        names.OTHER_TRACES: "the same of the other replicas and tensor ranks, which the report compares",
        names.PREDICTED_TRACE: "the same as predicted",
        TOKENIZER: "text to tokens and back, for the tokenizers library",
        TOKENIZER_CONFIG: "its end-of-text token and chat template, for transformers",
        names.SAMPLE: "a prompt from the validation text, and text from the model",
        names.SUMMARY: "these numbers",
        "checkpoints": f"its state; `pipeloom train --checkpoint.resume {quoted(folder)}` resumes with any layout",
        names.WEIGHTS: "the weights",
        names.WEIGHTS_INDEX: "the weights; which parameter is in which file",
        names.REPORT: "all of it as one page; open it in a browser",
    }
    for name, what in described.items():
        if any(folder.glob(name.split(",")[0])):  # some may be switched off
            print(hanging(f"  {name:<21} {what}", 24))


def _parameters(whole: int, config: RunConfig) -> str:
    """Number of parameters, of those that are trained, and of those that a token takes, as far as they differ."""
    from pipeloom.training.checkpoints.contents import trained_parameters

    text = f"{whole:,}"
    if config.frozen_pieces:
        text += f", of which {trained_parameters(config):,} are trained"
    if config.model.experts is not None and config.model.adapted is None:
        shape = shape_of(config.model)  # without norms, which every token takes
        text += f", of which a token takes {whole - (shape.parameters - shape.active_parameters):,}"
    return text


def _results(summary: "RunSummary", run: "Run") -> dict[str, str]:
    """What steps took and held, and what the model learned."""
    from pipeloom.report.contents import verdict_of

    verdict = verdict_of(run)
    step_s, bubble = summary.step_time_s, summary.bubble_fraction
    lines: dict[str, str] = {}
    if step_s is None or summary.tokens_per_s is None:
        lines["step time"] = "not measured: all steps were done before, with other settings or in another folder"
    else:
        lines["step time"] = f"{step_s * 1e3:,.0f} ms (median), {summary.tokens_per_s:,.0f} tokens/s"
    if verdict is not None:
        lines["verdict"] = "\n".join(verdict.lines).replace("\n", f"\n{'':18}")
    if summary.exchange_s is not None:
        lines["exchanges"] = f"{summary.exchange_s * 1e3:.0f} ms of a rank's traced step, of tensor parallelism"
    if any(summary.live_bytes):
        held = ", ".join(f"{nbytes / 1e6:,.1f}" for nbytes in summary.live_bytes)
        lines["activations"] = f"{held} MB held for backwards at most, by pipeline rank"
    if bubble is not None:
        predicted = summary.predicted_bubble_fraction
        also = "" if predicted is None else f", {predicted:.0%} predicted"
        ranks = "the ranks'" if not run.other_traces else "the first pipeline's ranks'"
        lines["bubble"] = f"{bubble:.0%} of {ranks} time in the traced step{also}"
    if summary.peak_stage_bytes is not None and summary.swap_s is not None and summary.swap_hidden_s is not None:
        hidden = f"{summary.swap_hidden_s / summary.swap_s:.0%} of them hidden" if summary.swap_s else "nothing to hide"
        lines["swapped stages"] = f"{summary.swap_s * 1e3:.0f} ms on their way in the traced step, {hidden}"
        lines[""] = f"at most {format_bytes(summary.peak_stage_bytes)} of them on the device"
    if summary.train_loss is not None:
        lines["training loss"] = f"{summary.train_loss:.4f} nats per token in step {summary.steps}"
    if summary.validation_loss is not None:
        lines["validation loss"] = f"{summary.validation_loss:.4f}"
    return lines | {"unigram loss": f"{summary.unigram_loss:.4f} (a model of token frequencies alone)"}
