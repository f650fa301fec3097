"""``pipeloom generate``: continue texts with a trained model."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pipeloom.cli.idle import each, with_idle_check
from pipeloom.cli.reference import Command, Place
from pipeloom.cli.run_config import parse_words, tokenizer_problems
from pipeloom.config import CheckpointConfig, RunConfig, ScheduleConfig, decided_problems
from pipeloom.config.layout_problems import NO_CACHE
from pipeloom.errors import ConfigError, UserError
from pipeloom.system.files import read_text
from pipeloom.system.garbage import kept_imports
from pipeloom.terminal.words import count, format_bytes
from pipeloom.workload.limits import Common, Count, Limits, Seed

_MOST_BYTES = 100_000_000
"""Most bytes of a file of prompts."""


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom generate``.

    Uses the newest complete checkpoint and its tokenizer. The layout is that of the run, without replicas; that of a
    Hugging Face folder is one rank.
    """

    config: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`, or a Hugging Face folder."""
    prompt: Common[tuple[str, ...]] = ()
    """Texts to continue."""
    prompts: Common[Path | None] = None
    """Text file with a prompt on each line."""
    max_tokens: Common[Count] = 100
    """Most new tokens of each text. A text ends earlier at the model's end-of-text token."""
    temperature: Common[Annotated[float, Limits(least=0)]] = 0.8
    """Divides the logits; 0 takes the most probable token."""
    top_k: Common[Count | None] = None
    """Draw among so many of the most probable tokens. None: all."""
    top_p: Common[Annotated[float, Limits(above=0, most=1)]] = 1.0
    """Draw among the fewest most probable tokens whose probabilities add up to this."""
    together: Common[Count] = 32
    """Most texts in the pipeline at the same time."""
    seed: Common[Seed] = 0
    """Random seed of the draws."""
    json: Common[bool] = False
    """Print a line of JSON for each text; its seconds are of all texts together."""


COMMAND = Command(
    name="generate",
    options=Options,
    examples={
        'pipeloom generate outputs/demo --prompt "To be"': "continue a text",
        "pipeloom generate outputs/demo --prompts lines.txt --temperature 0 --json": "each line of a file",
        'pipeloom generate outputs/demo --prompt "To be" --layout.pp 1 --layout.tp 2': "with another layout",
    },
    settings=(
        *("layout.pp", "layout.loops", "layout.tp", "layout.partition", "layout.pipeline_order"),
        *("layout.sequence_parallel", "schedule.device_budget", "schedule.swap_folder"),
        *("data.seq_len", "data.tokenizer", "training.dtype", "training.device", "training.threads"),
        *("training.run_ahead", "training.stall_timeout_s"),
    ),
    idle=each(("top_k", "top_p", "seed"), lambda options: "" if options.temperature else "with --temperature 0"),
    repeatable=("prompt",),
)


def _forwards(config: RunConfig) -> RunConfig:
    """The run without all that trains: one replica that runs forwards."""
    schedule = config.schedule
    return replace(
        config,
        layout=config.layout.of_forwards(),
        schedule=ScheduleConfig(device_budget=schedule.device_budget, swap_folder=schedule.swap_folder),
        training=replace(config.training, compile=False, compile_backend="inductor", freeze_layers=_frozen(config)),
        # The checkpoint that the run began with may be gone.
        checkpoint=CheckpointConfig(),
    )


def _frozen(config: RunConfig) -> int | None:
    """The frozen layers as far as they belong to the model: those without adapters."""
    return None if config.adapter.rank is None else config.training.freeze_layers


def _problems(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    found = decided_problems(_forwards(config), trains=False, is_model_known=is_model_known)
    found += [] if config.model.adapted is None else [NO_CACHE]
    return [*found, *tokenizer_problems(config)]


def run(words: list[str]) -> int:
    """Parse, continue the prompts, print them."""
    options = parse_words(COMMAND, words, with_idle_check(COMMAND, words, _problems)).options
    prompts = _prompts(options)
    with kept_imports():
        from pipeloom.training.inference.generation import Request, Sampling, generate

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    streams = len(prompts) == 1 and not options.json
    request = Request(prompts, options.max_tokens, sampling, options.together)
    found = generate(_forwards(options), options.config, request, streams=streams)
    if found is None:  # on other ranks of a launcher
        return 0
    if options.json:
        names = ("checkpoint", "prompt_s", "token_s", *(["peak_stage_bytes"] if found.peak_stage_bytes else []))
        of_all = {name: getattr(found, name) for name in names}
        for text in found.texts:
            print(json.dumps({**text._asdict(), **of_all}))
        return 0
    if not streams:
        print("\n\n".join(text.prompt + text.continuation for text in found.texts))
    more = f", {found.tokens_per_s:,.0f} tokens/s" if found.token_s else ""
    if found.peak_stage_bytes:
        more += f", at most {format_bytes(found.peak_stage_bytes)} of stages on the device"
    prompt = f"{count(found.prompt_tokens, 'token')} of prompts in {found.prompt_s:.2f} s"
    print(f"{Path(found.checkpoint).name}: {prompt}{more}", file=sys.stderr)
    return 0


def _prompts(options: Options) -> tuple[str, ...]:
    if bool(options.prompt) == (options.prompts is not None):
        found = "both" if options.prompt else "neither"
        raise ConfigError([f"expected one of --prompt TEXT and --prompts FILE, found {found}"], "the command line")
    prompts = options.prompt
    if options.prompts is not None:
        lines = read_text(options.prompts, most_bytes=_MOST_BYTES).splitlines()
        prompts = tuple(line for line in lines if line.strip())
        if not prompts:
            raise UserError(f"{options.prompts} has no prompt; write one on each line")
    if not all(prompts):
        raise ConfigError(["--prompt must not be empty"], "the command line")
    return prompts
