"""The command line: one function for each command, heavy imports inside."""

import gc
import importlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from pipeloom.errors import PipeloomError
from pipeloom.system.end_signals import ignore_stops, raised_signals
from pipeloom.system.garbage import kept_imports
from pipeloom.system.output import lasting_output
from pipeloom.terminal.guard import guarded_streams, print_beside

_FIRST_ENDS_S = 5.0
"""Seconds that other ranks of a launcher wait before they exit on wrong input, so that rank 0 exits first."""
GROUPS = {
    "train and check": {
        "train": "train a transformer with pipeline, data and tensor parallelism",
        "verify": "prove that the pipeline computes the gradients of a single process",
        "evaluate": "compute the loss of a trained model on a text",
        "generate": "continue texts with a trained model",
        "report": "write a run as one HTML page: predicted and measured side by side",
        "inspect": "show what each rank of a run does, and which one blocks a run that hangs",
        "tokenize": "encode a text of any size into a folder of tokens, which a run reads",
        "export": "write the weights of a checkpoint as safetensors files",
        "convert": "make another model of a trained one, such as one with experts",
    },
    "plan and predict": {
        "plan": "find the fastest layouts of a model on a cluster, with reasons",
        "simulate": "predict the step of a run on a cluster: time, MFU, bubble, memory",
        "tradeoff": "estimate training cost and time across cluster sizes",
        "survive": "estimate what failures of nodes leave of a training",
        "slices": "choose the token slices of a run's sequences (TeraPipe)",
        "launch": "write start files for a run: torchrun, Slurm, torchtitan, Megatron-LM",
        "validate": "compare predicted step times and memory with measurements",
    },
    "schedules": {
        "schedule": "print, draw or export a pipeline schedule with its bubble and memory",
        "playground": "draw schedules in the browser while sizes and costs change",
        "families": "compare all schedules: bubble, memory, messages",
    },
    "machine": {
        "profile": "measure this machine and write it as a cluster file",
        "catalog": "list and print clusters, models and training programs with their sources",
    },
}
"""Commands by purpose, with a description; ``pipeloom.cli.NAME.run(arguments)`` runs them."""
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
_TEXTS = ("generate", "--prompt")
"""The command and its option whose values are texts of any number of lines; no message repeats them."""

_USAGE = "\n".join(
    [
        "usage: pipeloom COMMAND ...",
        *(
            f"\n{group}\n" + "\n".join(f"  {name:<10} {line}" for name, line in commands.items())
            for group, commands in GROUPS.items()
        ),
        "\nexamples",
        "  pipeloom train                               train the demo: a small model on four processes",
        "  pipeloom schedule zb-v --plot s.svg          draw a schedule",
        "\npipeloom COMMAND --help shows what a command takes, and pipeloom --version the version.",
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 failed or differs, 2 wrong input, 128 and a signal's number."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with lasting_output() as lost, guarded_streams():
        status = _main(words)
    # A training is for the files of its run, any other command for what it prints.
    if lost and words[:1] != ["train"]:
        print_beside(f"pipeloom: the output is incomplete: {lost[0].strerror}")
        status = status or 1
    if arguments is None:  # the process ends
        # Python collects garbage once more at its end: half a second or more after a search, and nobody needs it.
        gc.freeze()
        if words[:1] == ["train"]:
            # Its end takes a second with PyTorch. Its status is that of the run, also for a scheduler whose signal
            # comes now.
            ignore_stops()
    return status


def _main(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help", "--help-all"):
        print(_USAGE)
        # --help is a correct call; no command at all is wrong input.
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"pipeloom {version('pipeloom')}")
        return 0
    if words[0] not in COMMANDS:
        from pipeloom.terminal.words import did_you_mean

        hint = did_you_mean(words[0], [*COMMANDS, "--help", "--version"])
        print(f"pipeloom: there is no command '{words[0]}'{'; ' if hint else ''}{hint}\n\n{_USAGE}", file=sys.stderr)
        return 2
    return _run(words[0], words[1:])


def _complain(command: str, message: str, error: BaseException) -> None:
    from pipeloom.errors import TRACEBACK

    if os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    print_beside("\n".join([f"pipeloom {command}: {message}", *getattr(error, "__notes__", [])]))


def _mention_broken_plugins(command: str, message: str = "") -> None:
    """Print which plug-ins were left out, once for all ranks, unless an error contains them."""
    from pipeloom.registry import broken_plugins

    for sentence in broken_plugins():
        if sentence not in message and os.environ.get("RANK", "0") == "0":
            print_beside(f"pipeloom {command}: {sentence}")


def _refuse_line_breaks(command: str, words: list[str]) -> None:
    """Refuse arguments with line breaks: printed in a message, they would look like lines of this program."""
    from pipeloom.errors import UserError
    from pipeloom.terminal.words import has_line_break

    broken, option = list[str](), ""
    for word in words:
        if word.startswith("--"):
            option = word.split("=", 1)[0]
        if has_line_break(word) and (command, option) != _TEXTS:
            broken.append(word)
    if broken:
        raise UserError(f"expected arguments of one line, found {', '.join(map(repr, broken))}; rename the file")


def _run(command: str, words: list[str]) -> int:
    from pipeloom.errors import HostError, Interrupted, UserError

    try:
        _refuse_line_breaks(command, words)
        # Before the imports, so that a scheduler's signal has the same status at any time.
        with raised_signals() if command == "train" else nullcontext():
            # The one module of the command: most start without torch, and each without the imports of the others.
            with kept_imports():
                from pipeloom.schedule.compiled import start_lean

                start_lean()
                module = importlib.import_module(f"pipeloom.cli.{command}")
            status = module.run(words)
    except PipeloomError as error:
        # all ranks of a launcher find the same wrong with the input, and all of a host the same with the host
        rank = "LOCAL_RANK" if isinstance(error, HostError) else "RANK"
        if not isinstance(error, UserError) or os.environ.get(rank, "0") == "0":
            _complain(command, str(error), error)
            _mention_broken_plugins(command, str(error))
        else:
            # A launcher ends all ranks when one exits: that must be the one that prints the message.
            time.sleep(_FIRST_ENDS_S)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            _complain(command, str(interrupt) or "interrupted", interrupt)
        # 128 + SIGINT, as shells report it.
        return interrupt.status if isinstance(interrupt, Interrupted) else 130
    else:
        _mention_broken_plugins(command)
        return status
