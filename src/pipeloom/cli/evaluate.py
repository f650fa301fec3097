"""``pipeloom evaluate``: the loss of a trained model on a text."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pipeloom.cli.reference import Command, Place
from pipeloom.cli.run_config import EVALUATION, parse_config
from pipeloom.config import CheckpointConfig, RunConfig, find_problems
from pipeloom.config.file import read_run_file
from pipeloom.runs.run_folder import CONFIG
from pipeloom.workload.limits import Common, Count


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom evaluate``.

    The model is that of the newest complete checkpoint. Without --data.path the loss is that of the run's validation
    text, with it that of the whole text. Every window counts once.
    """

    config: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`."""
    batches: Common[Count | None] = None
    """Evaluate the first batches only. None: every window."""
    json: Common[bool] = False
    """Print JSON for programs."""


COMMAND = Command(
    name="evaluate",
    options=Options,
    examples={
        "pipeloom evaluate outputs/demo": "its validation text",
        "pipeloom evaluate outputs/demo --data.path notes.txt": "another text",
        "pipeloom evaluate outputs/demo --layout.pp 1 --layout.dp 2": "with another layout",
    },
    settings=EVALUATION,
    brief=("data", "layout", "training.device"),
)


def _problems(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    # The checkpoint that the run began with may be gone.
    return find_problems(replace(config, checkpoint=CheckpointConfig()), is_model_known=is_model_known)


def run(words: list[str]) -> int:
    """Parse the configuration, evaluate on its ranks, print the loss."""
    options = parse_config(COMMAND, words, _problems)
    trained, _ = read_run_file(options.config / CONFIG)
    from pipeloom.training.evaluation import evaluate_run

    is_whole = options.data.path != trained.data.path
    found = evaluate_run(options, options.config, is_whole=is_whole, num_batches=options.batches)
    if found is None:  # on other ranks of a launcher
        return 0
    if options.json:
        print(json.dumps({**asdict(found), "perplexity": found.perplexity}))
        return 0
    part = "" if is_whole else ", its validation part"
    print(f"text       {found.text}{part}")
    print(f"model      {found.checkpoint}, step {found.step}")
    print(f"loss       {found.loss:.4f} nats per token over {found.tokens:,} tokens, perplexity {found.perplexity:.2f}")
    return 0
