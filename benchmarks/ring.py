"""Seconds of a generated token of a model that is swapped through its device, beside those of computing and of loading.

    python benchmarks/ring.py

Stages take a given time to compute and to load: they sleep, so that two lanes of one core run at the same time as those
of a device do. Period, computing and loading are measured: a token's mean over schedules of 16 tokens, and the sums of
the actions of their traces. The tokens must be those of the same weights without a budget.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeloom.cli import main as command
from pipeloom.cli.generate import COMMAND, _forwards, _problems
from pipeloom.cli.run_config import parse_words
from pipeloom.config import RunConfig
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.schedule import Kind
from pipeloom.training.inference.generation import Decoder, Request, Sampling, Vocabulary, _Sequence, encoded
from pipeloom.training.inference.trained import load_trained, with_trained
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import load_tokens, resolve
from pipeloom.training.stages import StageSizes

STAGES = 16
TRAIN = (
    f"train --training.steps 1 --model.num-layers {STAGES - 2} --model.hidden-size 32 --model.num-heads 2 "
    "--data.seq-len 64 --layout.pp 1 --layout.loops 1 --layout.num-microbatches 1 --training.no-predict "
    "--training.validation-batches 0 --training.sample-tokens 0 --output.folder"
)
NUM_TOKENS = 33
"""One behind the prompt, then two schedules."""


def slowed(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The method, which takes so many seconds more."""

    def run(*arguments: Any, **settings: Any) -> Any:
        time.sleep(seconds)
        return method(*arguments, **settings)

    return run


def measured(config: RunConfig, seconds: tuple[float, float], rendezvous: Any, rank: int, size: int) -> dict[str, Any]:
    """Generate with stages that take so many seconds more to compute and to load: seconds of a token, bytes, tokens."""
    Stage.forward, StageStore.bring = map(slowed, (Stage.forward, StageStore.bring), seconds)
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    loaded = load_tokens(config)
    config = resolve(config, loaded)
    pipeline = Pipeline(config, world, trains=False)
    load_trained(config, world, pipeline, loaded.tokenizer)
    results: list[Any] = []
    honest = pipeline._run
    pipeline._run = lambda *arguments: results.append(honest(*arguments)) or results[-1]
    request = Request(("def f(x): return ",), NUM_TOKENS, Sampling(temperature=0))
    tokenizer = loaded.tokenizer
    vocabulary = Vocabulary(tokenizer.vocab_size, frozenset({tokenizer.end_of_text}))
    decoder = Decoder(pipeline, world, vocabulary, config, request)
    sequences = [_Sequence.of(tokens, 0) for tokens in encoded(config, loaded.tokenizer, request)]
    decoder.run(sequences)
    pipeline.close()
    world.leave()
    spans = [span for result in results[1:] for span in result.trace.spans]
    number = len(sequences[0].drawn) - 1
    sums = {
        name: sum(span.end_s - span.start_s for span in spans if span.action.kind is kind) / number
        for name, kind in (("compute_s", Kind.FORWARD), ("load_s", Kind.SWAP_IN))
    }
    return {
        **sums,
        "period_s": decoder.token_s / number,
        "peak": decoder.peak_stage_bytes,
        "tokens": sequences[0].drawn,
    }


def main() -> None:
    """Print a row for each load, beside computing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute-ms", type=float, default=10.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.9, 1.0, 1.5])
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        run = Path(name) / "run"
        if command([*TRAIN.split(), str(run)]):
            raise SystemExit("the run failed")
        words = [str(run), "--layout.loops", str(STAGES), "--schedule.device-budget", "1GB"]
        config = with_trained(_forwards(parse_words(COMMAND, words, _problems).options), run)
        sizes = [int(one.weights) for one in StageSizes(resolve(config, load_tokens(config)), trains=False).stages()]
        budget = max(map(sum, pairwise(sizes)))
        ring = replace(config, schedule=replace(config.schedule, device_budget=str(budget)))
        whole = replace(config, schedule=replace(config.schedule, device_budget=None))
        plain = run_workers(partial(measured, whole, (0.0, 0.0)), 1)[0]
        print(f"budget {budget:,} bytes of {sum(sizes):,}; ms of a token")
        print("load of a stage / compute  compute  load  period  period / larger  most bytes  same tokens")
        for load in options.loads:
            seconds = options.compute_ms / 1e3, load * options.compute_ms / 1e3
            found = run_workers(partial(measured, ring, seconds), 1)[0]
            compute, loads, period = (found[name] * 1e3 for name in ("compute_s", "load_s", "period_s"))
            print(
                f"{load:25.2f}  {compute:7.1f}  {loads:4.0f}  {period:6.1f}  {period / max(compute, loads):15.3f}"
                f"  {found['peak']:10,}  {found['tokens'] == plain['tokens']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
