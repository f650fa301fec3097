"""Tokens per second of ``pipeloom generate`` beside transformers' ``generate``, with the same weights and cores.

Run by ``make bench-generate``. A model is trained for one step, exported and loaded by transformers. Both continue the
same prompts by the most probable tokens, in turn, with one thread each process; the tokens must be equal.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

ROUNDS = 5
NEW_TOKENS = 100
PROMPTS = [f"def f{number}(x): return " for number in range(8)]
TRAIN = (
    "train --training.steps 1 --model.num-layers 8 --model.hidden-size 256 --model.num-heads 8 --data.seq-len 256 "
    "--layout.pp 1 --layout.loops 1 --layout.num-microbatches 8 --layout.microbatch-size 1 --training.no-predict "
    "--training.validation-batches 0 --training.sample-tokens 0 --output.folder"
)
CASES = {
    "1 prompt, 1 process": (1, []),
    "1 prompt, pp 2": (1, ["--layout.pp", "2"]),
    "8 prompts, 1 process": (8, []),
    "8 prompts, pp 2": (8, ["--layout.pp", "2"]),
    "8 prompts, pp 2 x tp 2": (8, ["--layout.pp", "2", "--layout.tp", "2"]),
}
"""Name -> number of prompts, and flags."""


def pipeloom(*words: str) -> str:
    """Run a command; returns its output."""
    done = subprocess.run([sys.executable, "-m", "pipeloom", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def ours(run: Path, number: int, flags: list[str]) -> tuple[float, list[list[int]]]:
    """Seconds of all steps, without the start of processes, and the tokens of each prompt."""
    words = ["--prompt", *PROMPTS[:number], "--max-tokens", str(NEW_TOKENS), "--temperature", "0", "--json"]
    lines = [json.loads(line) for line in pipeloom("generate", str(run), *words, *flags).splitlines()]
    return lines[0]["prompt_s"] + lines[0]["token_s"], [line["tokens"] for line in lines]


def theirs(model: torch.nn.Module, number: int) -> tuple[float, list[list[int]]]:
    """The same of transformers; prompts of equal length are one batch."""
    tokens = torch.tensor([list(prompt.encode()) for prompt in PROMPTS[:number]])
    begin = time.perf_counter()
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return time.perf_counter() - begin, made[:, tokens.shape[1] :].tolist()


def main() -> None:
    """Print tokens per second of both, medians of rounds in turn."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, exported = folder / "run", folder / "exported"
        pipeloom(*TRAIN.split(), str(run))
        pipeloom("export", str(run), str(exported), "--format", "hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
        print(f"{'case':<24} {'pipeloom':>9} {'transformers':>12}  ratio of times   (tokens/s, median of {ROUNDS})")
        for case, (number, flags) in CASES.items():
            rounds = [(ours(run, number, flags), theirs(model, number)) for _ in range(ROUNDS)]
            assert all(one[1] == other[1] for one, other in rounds), f"{case}: other tokens"
            one_s, other_s = (median(pair[side][0] for pair in rounds) for side in (0, 1))
            ratios = sorted(one[0] / other[0] for one, other in rounds)
            rates = number * NEW_TOKENS / one_s, number * NEW_TOKENS / other_s
            spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{case:<24} {rates[0]:>9,.0f} {rates[1]:>12,.0f}  {spread}", flush=True)


if __name__ == "__main__":
    main()
