"""Memory and speed of ``pipeloom tokenize``, and the time that batches take. Run by ``make bench-tokenize``.

Writes records of invented words, tokenizes them with byte-pair encoding and adds up the memory of all processes
(proportional set size: pages that several share count once) every quarter of a second. Then batches are read in the
order of training: memory-mapped, from a file that was just written.

    python benchmarks/tokenizing.py [--gb 5] [--workers 2] [--tokenizer bytes]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from pipeloom.config import DataConfig
from pipeloom.data.text import load_data

_PARAGRAPHS = 4000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = _write_text(folder / "text.jsonl", round(options.gb * 1e9))
        command = ["tokenize", str(text), str(folder / "tokens"), "--tokenizer", options.tokenizer]
        begin, most = time.perf_counter(), 0
        command = [sys.executable, "-m", "pipeloom", *command, "--workers", str(options.workers), "--quiet"]
        process = subprocess.Popen(command)
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(0.25)
        seconds = time.perf_counter() - begin
        assert process.returncode == 0
        gb = text.stat().st_size / 1e9
        print(f"text       {gb:.2f} GB of records")
        print(f"memory     {most / 1e6:.0f} MB at most, in {options.workers + 1} processes")
        print(f"time       {seconds:.0f} s, {gb * 1e3 / seconds:.1f} MB/s")
        _read(folder / "tokens", options.tokenizer == "bytes")


def _write_text(file: Path, num_bytes: int) -> Path:
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    sizes = random.integers(2, 11, 30_000)
    words = ["".join(random.choice(letters, size)) for size in sizes]
    # Frequencies as those of words: inverse to the rank.
    shares = 1 / np.arange(1, len(words) + 1)
    texts = [" ".join(random.choice(words, 150, p=shares / shares.sum())) for _ in range(_PARAGRAPHS)]
    lines = [json.dumps({"text": f"{one}\n{two}."}) + "\n" for one, two in zip(texts, texts[::-1], strict=True)]
    whole = "".join(lines).encode()
    with file.open("wb") as out:
        for _ in range(-(-num_bytes // len(whole))):
            out.write(whole)
    return file


def _memory(pid: int) -> int:
    """Proportional set size of a process and those that it started, in bytes."""
    total, waiting = 0, [pid]
    while waiting:
        one = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError):  # it has ended
            lines = (one / "smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
            waiting += [int(child) for task in (one / "task").iterdir() for child in _children(task)]
    return total


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def _read(folder: Path, is_bytes: bool) -> None:
    config = DataConfig(path=folder, tokenizer="bytes" if is_bytes else folder, seq_len=1024)
    begin = time.perf_counter()
    data = load_data(config, 0)
    print(
        f"open       {(time.perf_counter() - begin) * 1e3:.0f} ms: {data.train.num_windows:,} windows of 1,025 tokens"
    )
    seconds: list[float] = []
    for index in range(min(400, data.train.num_windows // 64)):
        begin = time.perf_counter()
        data.train.batch(index, 64)
        seconds.append(time.perf_counter() - begin)
    first, middle, most = (value * 1e3 for value in (seconds[0], float(np.median(seconds)), max(seconds[1:])))
    print(f"batch      {middle:.2f} ms of 64 windows (median), {most:.1f} ms at most, {first:.0f} ms for the first")


if __name__ == "__main__":
    main()
