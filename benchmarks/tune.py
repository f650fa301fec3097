"""From a model to a tuned one that transformers loads: import, train on a text, evaluate, export, load, compare.

Run by ``make tune``. There is no network, so the model to start from is trained here first, and exported as the Hugging
Face folder that would otherwise be downloaded.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "docs" / "concepts"
"""The user's own text, which the first model has not read."""
FIRST = (
    "train --training.steps 60 --model.num-layers 6 --model.hidden-size 128 --model.num-heads 4 --data.seq-len 64 "
    "--layout.pp 2 --layout.loops 2 --layout.num-microbatches 8 --data.tokenizer bpe --data.bpe-vocab-size 512 "
    "--output.folder {folder}/first"
)
TUNED = (
    "train --model.file {folder}/base --checkpoint.init {folder}/base --data.path {text} --data.seq-len 64 "
    "--layout.pp 1 --layout.dp 2 --layout.shard full --layout.loops 3 --layout.num-microbatches 4 "
    "--optimizer.lr 5e-4 --optimizer.lr-warmup-steps 5 --training.steps 40 --output.folder {folder}/tuned"
)


def pipeloom(command: str, folder: Path) -> str:
    """Run a command, print it with its time; returns its output."""
    words = shlex.split(command.format(folder=folder, text=TEXT))
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pipeloom", *words], capture_output=True, text=True, check=False)
    print(f"{time.monotonic() - begin:6.1f} s  pipeloom {shlex.join(words)[:100]}", flush=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def loss_of_transformers(folder: Path, run: Path) -> float:
    """The loss of the exported model in transformers, on the windows that ``pipeloom evaluate`` reads."""
    import transformers

    from pipeloom import load_run
    from pipeloom.data.text import load_data
    from pipeloom.training.inference.evaluation import each_once

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = load_run(run / "config.toml")
    windows = load_data(config.data, config.training.seed).validation
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch, num_counted in each_once(windows, 8):
            found = torch.from_numpy(batch[:num_counted].astype("int64"))
            logits = model(found[:, :-1]).logits.flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, found[:, 1:].flatten(), reduction="sum"))
            tokens += found[:, 1:].numel()
    return total / tokens


def main() -> int:
    """Print each step with its time, and the losses; 0 if they agree."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipeloom(FIRST, folder)
        pipeloom("export {folder}/first {folder}/base --format hf", folder)
        files = ", ".join(sorted(path.name for path in (folder / "base").iterdir()))
        print(f"        the folder that stands for a published model: {files}")
        before = json.loads(pipeloom("evaluate {folder}/first --data.path {text} --json", folder))["loss"]
        pipeloom(TUNED, folder)
        after = json.loads(pipeloom("evaluate {folder}/tuned --json", folder))["loss"]
        pipeloom("export {folder}/tuned {folder}/out --format hf", folder)
        theirs = loss_of_transformers(folder / "out", folder / "tuned")
        print(f"{time.monotonic() - begin:6.1f} s  in all")
        print(f"loss on the text before: {before:.4f}; on its validation part after tuning: {after:.4f}")
        print(f"the same in transformers: {theirs:.4f}")
        return int(abs(after - theirs) > 1e-4 or after > before)


if __name__ == "__main__":
    sys.exit(main())
