"""Seconds that steps wait for their data, with a mixture of packed texts. Run by ``make bench-loading``.

Three texts in the shares 5 : 3 : 1, best-fit packing, attention within documents. First the batches are read one after
the other, as if each step waited for its own. Then a thread reads them beside steps of a given time, which compute, for
more than an epoch of two texts: the windows of each epoch are sorted anew. Last, a real run of two ranks.

    python benchmarks/loading.py [--mb 90] [--step-ms 20] [--batch 256] [--batches 1000]
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeloom import load_run, train
from pipeloom.config.sections import DataConfig, SourceConfig
from pipeloom.data.text import load_data
from pipeloom.training.loading import Loading

SEQ_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, default=90.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shares = {"web": (5, 0.85), "code": (3, 0.12), "papers": (1, 0.03)}
        sources = tuple(
            SourceConfig(path=_write(folder / f"{text}.jsonl", round(options.mb * size * 1e6)), weight=weight)
            for text, (weight, size) in shares.items()
        )
        settings = {"seq_len": SEQ_LEN, "pack": "best-fit", "attention": "document", "cache": folder / "cache"}
        config = DataConfig(sources=sources, **settings)
        begin = time.perf_counter()
        windows = load_data(config, 0).train
        print(f"tokenize   {time.perf_counter() - begin:.1f} s for {options.mb:g} MB in 3 texts")
        begin = time.perf_counter()
        windows = load_data(config, 0).train
        print(
            f"open       {time.perf_counter() - begin:.1f} s: {windows.num_windows:,} windows of {SEQ_LEN + 1} tokens"
        )
        seconds = []
        for index in range(options.batches):
            begin = time.perf_counter()
            windows.batch(index, options.batch)
            seconds.append(time.perf_counter() - begin)
        print(f"alone      {_words(seconds)} to read a batch of {options.batch} windows")
        waits = _beside_steps(load_data(config, 0).train, options)
        print(f"beside     {_words(waits)} that steps of {options.step_ms:g} ms waited for it")
        run = load_run(
            data={"seq_len": SEQ_LEN},
            model={"num_layers": 4, "hidden_size": 64, "num_heads": 2},
            layout={"pp": 2, "loops": 2, "num_microbatches": 8, "microbatch_size": 4},
            training={"steps": 60, "sample_tokens": 0},
            output={"folder": folder / "run"},
        )
        train(replace(run, data=config), quiet=True)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        step_s = np.median([line["step_time_s"] for line in lines])
        print(f"a run      {_words([line['data_wait_s'] for line in lines])} of {step_s * 1e3:.0f} ms a step")


def _beside_steps(windows, options) -> list[float]:
    matrix = np.random.default_rng(0).standard_normal((256, 256))
    loading, waits = Loading(windows, options.batch, 1, options.batches), []
    time.sleep(options.step_ms / 1e3)  # a run predicts its step meanwhile
    for _ in range(options.batches):
        loading.take()
        waits.append(loading.waited_s)
        end = time.perf_counter() + options.step_ms / 1e3
        while time.perf_counter() < end:
            matrix @ matrix
    loading.close()
    return waits


def _words(seconds: list[float]) -> str:
    first, *others = (one * 1e3 for one in seconds)
    return f"{np.median(others):.2f} ms (median), {max(others):.1f} ms at most, {first:.1f} ms for the first,"


def _write(file: Path, num_bytes: int) -> Path:
    random = np.random.default_rng(len(file.name))
    words = ["".join(random.choice(list("etaoinshrdlu"), size)) for size in random.integers(2, 9, 2000)]
    texts = [" ".join(random.choice(words, size)) for size in random.geometric(1 / 40, 4000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    with file.open("w") as out:
        for _ in range(-(-num_bytes // len(lines))):
            out.write(lines)
    return file


if __name__ == "__main__":
    main()
