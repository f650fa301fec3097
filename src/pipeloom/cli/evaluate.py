"""``pipeloom evaluate``: the loss of a trained model on a text."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pipeloom.cli.reference import Command, Place
from pipeloom.cli.run_config import EVALUATION, parse_words, tokenizer_problems
from pipeloom.config import CheckpointConfig, RunConfig, decided_problems, unset
from pipeloom.system.files import strict_json
from pipeloom.system.garbage import kept_imports
from pipeloom.workload.limits import Common, Count


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom evaluate``.

    Uses the newest complete checkpoint. Without --data.path it evaluates the run's validation text, with it the whole
    given text, even if the run was trained on it; a Hugging Face folder needs one. Every window counts once. What only
    training has, such as recomputation and the family of the schedule, is not used.
    """

    config: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`, or a Hugging Face folder."""
    batches: Common[Count | None] = None
    """Evaluate the first batches only. None: every window."""
    json: Common[bool] = False
    """Print JSON for programs."""


COMMAND = Command(
    name="evaluate",
    options=Options,
    examples={
        "pipeloom evaluate outputs/demo": "on its validation text",
        "pipeloom evaluate outputs/demo --data.path notes.txt": "on another text",
        "pipeloom evaluate outputs/demo --layout.pp 1 --layout.dp 2": "with another layout",
    },
    settings=EVALUATION,
    brief=("data", "layout", "training.device"),
)


def _forwards(config: RunConfig) -> RunConfig:
    """The run with defaults for what its forwards do not read of layout and schedule, so that these refuse nothing."""
    layout, schedule = (replace(getattr(config, name), **_unread(name)) for name in ("layout", "schedule"))
    return replace(config, layout=layout, schedule=schedule)


def _unread(section: str) -> dict[str, Any]:
    """The defaults of a section's settings that evaluations do not read."""
    default = getattr(RunConfig(), section)
    names = [item.name for item in fields(default) if f"{section}.{item.name}" not in EVALUATION]
    return {name: getattr(default, name) for name in names}


def _judge(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    # The checkpoint that the run began with may be gone.
    forwards = replace(_forwards(config), checkpoint=CheckpointConfig())
    found = decided_problems(forwards, is_model_known=is_model_known)
    if "data.path" in unset(config):
        found.append("data.path must be set, since a model of Hugging Face folders has no text")
    return [*found, *tokenizer_problems(config)]


def run(words: list[str]) -> int:
    """Parse the configuration, evaluate on its ranks, print the loss."""
    options, _, flags, _ = parse_words(COMMAND, words, _judge)
    with kept_imports():
        from pipeloom.training.inference.evaluation import evaluate_run

    is_whole = "data.path" in flags
    found = evaluate_run(_forwards(options), options.config, is_whole=is_whole, num_batches=options.batches)
    if found is None:  # on other ranks of a launcher
        return 0
    if options.json:
        print(strict_json({**asdict(found), "perplexity": found.perplexity}))
        return 0
    part = "" if is_whole else ", its validation part"
    print(f"text       {found.text}{part}")
    print(f"model      {found.checkpoint}{'' if found.step is None else f', step {found.step}'}")
    print(f"loss       {found.loss:.4f} nats per token over {found.tokens:,} tokens, perplexity {found.perplexity:.2f}")
    return 0
