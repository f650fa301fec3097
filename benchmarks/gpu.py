"""Every CUDA path of pipeloom on one device, and a llama of 1 B parameters beside a plain loop, in ten minutes.

Run by ``make gpu``. Each case is a process of its own, whose losses are compared with those of the same run on the CPU.
Writes one table, ``outputs/gpu.md``. Without a CUDA device it ends with status 2.

    python benchmarks/gpu.py [--dry-run] [--only TEXT] [--out FILE]
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from pipeloom.training.optimizers.optimizer import learning_rate

BUDGET_S = 600.0
STEPS = 12
TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}
"""Largest relative difference of a loss to that on the CPU in float32."""
MODEL = (
    "--model.num-layers 6 --model.hidden-size 256 --model.num-heads 4 --data.seq-len 128 --training.no-predict "
    "--training.validation-batches 1 --training.sample-tokens 8"
)
ONE = "--layout.pp 1 --layout.loops 4 --layout.num-microbatches 4"
LARGE = {"layers": 16, "hidden": 2048, "heads": 16, "ffn": 5632, "vocab": 32000, "seq": 1024, "batch": 4, "micro": 2}
SMALL = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 300, "seq": 32, "batch": 4, "micro": 2}
"""Sizes of the llama beside the plain loop, and of its dry run."""


@dataclass
class Case:
    """A case.

    Attributes:
        name: what of CUDA it runs.
        words: settings of the run.
        dtype: of the run.
        check: what is wrong with the run folder, and what was found, in words; raises for what is wrong.
        more: further environment.
    """

    name: str
    words: str
    dtype: str = "float32"
    check: Callable[["Bench", Path], str] = lambda *_: ""
    more: dict[str, str] = field(default_factory=dict)


def has_checkpoints(_: "Bench", run: Path) -> str:
    """Two checkpoints of a thread."""
    found = sorted(one.name for one in (run / "checkpoints").iterdir())
    assert "step-000004" in found, f"expected step-000004, found {found}"
    return f"{len(found)} checkpoints"


def resumes(bench: "Bench", run: Path) -> str:
    """The losses from a checkpoint on, in another layout."""
    checkpoint, folder = run / "checkpoints" / "step-000004", run.parent / f"{run.name}-again"
    words = f"--checkpoint.resume {checkpoint} --layout.loops 2 --output.folder {folder}"
    bench.train(words, str(run / "config.toml"))
    bench.compare(losses(folder), losses(run), "float32")
    return "resumed in another layout"


def has_profile(_: "Bench", run: Path) -> str:
    """A trace of torch.profiler."""
    files = list((run / "profile").glob("*.json.gz"))
    assert files, "expected a trace of torch.profiler in profile/, found none"
    return f"{files[0].stat().st_size / 1e6:.1f} MB of profile"


def cases() -> list[Case]:
    """All cases, the quickest first."""
    offload = "--schedule.family breadth-first --schedule.offload --schedule.activation-budget 1MB"
    return [
        Case("one stage", "--layout.pp 1 --layout.loops 1 --layout.num-microbatches 4"),
        Case("several stages, streams", ONE),
        Case("split backwards", f"{ONE} --schedule.family breadth-first --layout.recompute selective"),
        Case("bfloat16", ONE, "bfloat16"),
        Case("recomputation", f"{ONE} --layout.recompute full"),
        Case("token slices", "--layout.pp 1 --layout.loops 2 --layout.num-microbatches 4 --layout.token-slices 4"),
        Case("documents", f"{ONE} --data.attention document"),
        Case("offload of activations", f"{ONE} {offload}"),
        Case("device budget", f"{ONE} --schedule.device-budget 12MB"),
        Case("background checkpoints", f"{ONE} --checkpoint.every 4", check=has_checkpoints),
        Case("resume", f"{ONE} --checkpoint.every 4", check=resumes),
        Case("profile of steps", f"{ONE} --output.profile 3", check=has_profile),
        Case("prediction", ONE.replace("4", "2", 1) + " --training.predict"),
        Case("compile", f"{ONE} --training.compile", "bfloat16"),
    ]


class Bench:
    """Runs cases.

    Args:
        folder: of all runs.
        device: of the runs.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device, self.is_dry = folder, device, device == "cpu"
        self.end_s = time.monotonic() + BUDGET_S
        self.rows: list[tuple[str, str, str, str]] = []
        self._reference: dict[str, list[float]] = {}

    def command(self, *words: str) -> list[str]:
        """Words of a command."""
        return [sys.executable, "-m", "pipeloom", *words]

    def call(self, words: Sequence[str], **more: str) -> str:
        """Run a command within what is left of the time; returns what it printed."""
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | more,
            timeout=max(5.0, self.end_s - time.monotonic()),
        )
        if done.returncode:
            raise AssertionError(f"status {done.returncode}: {' '.join(done.stderr.strip().splitlines()[:2])[:300]}")
        return done.stdout

    def train(self, words: str, *first: str, **more: str) -> str:
        """Train."""
        return self.call([*self.command("train", *first), *words.split()], **more)

    def run(self, name: str, do: Callable[[], tuple[str, str]]) -> None:
        """Add a row; a failure is one, too."""
        begin_s = time.monotonic()
        try:
            self.check_time()
            step, found = do()
            row = (name, "ok", step, found)
        except (TimeoutError, subprocess.TimeoutExpired):
            row = (name, "not run", "", f"the {BUDGET_S:.0f} s are over")
        except Exception as error:  # every failure of a case is a row
            row = (name, "FAILED", "", str(error).replace("\n", " ")[:200] or type(error).__name__)
        self.rows.append(row)
        print(f"{row[0]:<28} {row[1]:<8} {row[2]:>9}  {row[3]} ({time.monotonic() - begin_s:.0f} s)", flush=True)

    def check_time(self) -> None:
        """Raise a ``TimeoutError`` when the time is over."""
        if time.monotonic() > self.end_s:
            raise TimeoutError

    def case(self, case: Case) -> tuple[str, str]:
        """Train a case, and compare its losses with the CPU's."""
        run = self.folder / case.name.replace(" ", "-").replace(",", "")
        device = f"--training.device {self.device} --training.dtype {case.dtype} --output.folder {run}"
        self.train(f"{MODEL} {case.words} --training.steps {STEPS} {device}", **case.more)
        found = losses(run)
        error = self.compare(found, self.reference(case), case.dtype)
        also = case.check(self, run)
        return step_ms(run), f"losses differ by {error:.1e} from the CPU's{', ' if also else ''}{also}"

    def reference(self, case: Case) -> list[float]:
        """The losses of a plain layout on the CPU."""
        documents = "--data.attention document" if "document" in case.words else ""
        if documents not in self._reference:
            run = self.folder / f"reference{len(self._reference)}"
            words = f"{MODEL} --layout.pp 1 --layout.loops 1 --layout.num-microbatches 4 {documents}"
            self.train(f"{words} --training.steps {STEPS} --training.threads 4 --output.folder {run}")
            self._reference[documents] = losses(run)
        return self._reference[documents]

    def compare(self, found: list[float], wanted: list[float], dtype: str) -> float:
        """The largest relative difference; raises beyond the tolerance."""
        assert len(found) == len(wanted), f"{len(found)} steps instead of {len(wanted)}"
        error = max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))
        assert error <= TOLERANCE[dtype], f"losses differ by {error:.1e}, more than {TOLERANCE[dtype]:.0e}"
        return error

    def verify(self) -> tuple[str, str]:
        """Gradients of the pipeline against one process."""
        words = f"--layout.pp 1 --layout.loops 2 --training.device {self.device} --model.num-layers 4 "
        words += "--model.hidden-size 64 --model.num-heads 2 --data.seq-len 32"
        return "", self.call([*self.command("verify"), *words.split()]).strip().splitlines()[-1][:100]

    def machine(self) -> tuple[str, str]:
        """The machine as a cluster file."""
        file = self.folder / "here.toml"
        self.call(self.command("profile", "--output", str(file), "--device", self.device, "--budget-s", "20"))
        return "", f"{len(file.read_text().splitlines())} lines of a cluster file"

    def inspect(self) -> tuple[str, str]:
        """A stopped run is explained, and goes on."""
        run = self.folder / "stopped"
        words = f"{MODEL} {ONE} --training.steps 100000 --training.device {self.device} --output.folder {run}"
        process = subprocess.Popen(
            self.command("train", *words.split()), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while not (run / "metrics.jsonl").exists():
                assert process.poll() is None, "the run ended"
                time.sleep(0.2)
            from pipeloom.runs.action_log import read_ranks

            time.sleep(1)
            (rank,) = read_ranks(run / "actions")
            os.kill(rank.pid, signal.SIGSTOP)
            time.sleep(1)
            output = self.call(self.command("inspect", str(run))).splitlines()
            os.kill(rank.pid, signal.SIGCONT)
        finally:
            process.terminate()
            process.communicate(timeout=60)
        assert any("is stopped" in line for line in output), " ".join(output)[:200]
        assert process.returncode == 75, f"status {process.returncode} after SIGTERM"
        return "", output[2][:110]

    def restart(self) -> tuple[str, str]:
        """A killed run goes on from memory."""
        run = self.folder / "killed"
        words = f"{MODEL} {ONE} --training.steps 60 --training.device {self.device} --output.folder {run} "
        words += "--restart.times 1"
        process = subprocess.Popen(
            self.command("train", *words.split()), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        from pipeloom.runs.action_log import read_ranks

        while not (run / "metrics.jsonl").exists() or len(losses(run)) < 5:
            assert process.poll() is None, "the run ended"
            time.sleep(0.1)
        os.kill(read_ranks(run / "actions")[0].pid, signal.SIGKILL)
        printed = process.communicate(timeout=120)[1]
        assert process.returncode == 0, printed[:200]
        return step_ms(run), (run / "warnings.txt").read_text().strip().partition("  ")[2][:110]

    def large(self, sizes: dict[str, int]) -> tuple[str, str]:
        """Speed, memory and losses of a llama beside a plain loop."""
        run, dtype = self.folder / "large", "float32" if self.is_dry else "bfloat16"
        words = (
            f"--model.family llama --model.num-layers {sizes['layers']} --model.hidden-size {sizes['hidden']} "
            f"--model.num-heads {sizes['heads']} --model.ffn-size {sizes['ffn']} --model.vocab-size {sizes['vocab']} "
            f"--data.seq-len {sizes['seq']} --layout.pp 1 --layout.loops 1 --layout.num-microbatches {sizes['micro']} "
            f"--layout.microbatch-size {sizes['batch'] // sizes['micro']} --training.steps {STEPS} "
            f"--training.no-predict --training.validation-batches 0 --training.sample-tokens 0 "
            f"--checkpoint.final none --optimizer.lr 1e-4 --optimizer.lr-warmup-steps 1 "
            f"--training.device {self.device} --training.dtype {dtype} --output.folder {run}"
        )
        self.train(words)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        ours_s = median(line["step_time_s"] for line in lines[2:])
        ours_bytes = max(max(line.get("memory_bytes", [0])) for line in lines)
        plain = json.loads(self.call([sys.executable, __file__, "--plain", self.device, str(run)]))
        plain_s = median(plain["seconds"][2:])
        gap = self.compare(losses(run), plain["losses"], dtype)
        found = (
            f"{plain_s / ours_s:.2f} x the speed of the plain loop ({plain_s * 1e3:.0f} ms), "
            f"{ours_bytes / 1e9:.1f} GB beside {plain['bytes'] / 1e9:.1f} GB, losses differ by {gap:.1e}"
        )
        return f"{ours_s * 1e3:.0f} ms", found


def plain_loop(device: str, run: Path) -> None:
    """Train the model of a run in a plain loop, with its first weights and its batches; prints figures as JSON."""
    from torch.nn import functional

    from peers.plain import PlainLlama, plain_names
    from peers.programs import adamw
    from pipeloom.config.file import read_run_file
    from pipeloom.data.windows import without_marks
    from pipeloom.training.session import load_text, resolve
    from pipeloom.training.stages import stage_of

    config, _ = read_run_file(run / "config.toml")
    data = load_text(config)
    config, is_cuda = resolve(config, data), device == "cuda"
    whole = dict(stage_of(config, range(config.model.num_layers + 2), "cpu").named_parameters())
    model = PlainLlama(config.model, config.data.seq_len)
    model.load_state_dict({name: whole[own] for name, own in plain_names(config.model).items()}, strict=False)
    model, layout = model.to(device), config.layout
    optimizer = adamw(model.parameters(), config.optimizer.values)
    seconds, found = list[float](), list[float]()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, STEPS)
        begin_s, loss_sum = time.perf_counter(), 0.0
        windows = torch.from_numpy(without_marks(data.train.batch(step, layout.batch_size))).to(device)
        for rows in windows.split(layout.microbatch_size):
            with torch.autocast(device, torch.bfloat16, enabled=is_cuda):
                logits = model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            (loss / layout.num_microbatches).backward()
            loss_sum += float(loss.detach()) / layout.num_microbatches
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin_s)
        found.append(loss_sum)
    used = torch.cuda.max_memory_allocated() if is_cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "losses": found, "bytes": used}))


def losses(run: Path) -> list[float]:
    """Losses of the steps of a run."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


def step_ms(run: Path) -> str:
    """The median step of a run."""
    times = [json.loads(line)["step_time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return f"{median(times[2:]) * 1e3:.1f} ms"


def table(rows: Sequence[tuple[str, str, str, str]], device: str) -> str:
    """All rows as a page."""
    lines = [
        f"# CUDA paths on {device}, PyTorch {torch.__version__}",
        "",
        "| case | result | step | found |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def main() -> int:
    """Run all cases; 1 if one failed, 2 without a CUDA device."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dry-run", action="store_true", help="all cases on the CPU, small, to try the script")
    options.add_argument("--only", default="", help="only cases whose names contain it")
    options.add_argument("--out", type=Path, default=Path("outputs/gpu.md"))
    options.add_argument("--plain", nargs=2, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.plain:
        plain_loop(chosen.plain[0], Path(chosen.plain[1]))
        return 0
    if not chosen.dry_run and not torch.cuda.is_available():
        built = torch.version.cuda or "without CUDA"
        print(
            f"make gpu: expected a CUDA device, found none (PyTorch {torch.__version__}, built {built}); run it on a "
            "host with an NVIDIA GPU and a PyTorch for CUDA (TORCH_INDEX= make ...), or try the script with "
            "ARGS=--dry-run",
            file=sys.stderr,
        )
        return 2
    device = "cpu" if chosen.dry_run else "cuda"
    folder = Path(tempfile.mkdtemp(prefix="pipeloom-gpu-"))
    bench = Bench(folder, device)
    sizes = SMALL if chosen.dry_run else LARGE
    others = {
        "llama beside a plain loop": lambda: bench.large(sizes),
        "gradients verified": bench.verify,
        "inspect": bench.inspect,
        "restart from memory": bench.restart,
        "profile of the machine": bench.machine,
    }
    # The comparison first: the time limit should not reach it.
    work = list(others.items())
    work += [(case.name, lambda case=case: bench.case(case)) for case in cases()]
    try:
        for name, do in work:
            if chosen.only in name:
                bench.run(name, do)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    name = "a dry run on the CPU" if chosen.dry_run else torch.cuda.get_device_name()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(table(bench.rows, name))
    wrong = sum(row[1] != "ok" for row in bench.rows)
    print(f"\n{len(bench.rows) - wrong} of {len(bench.rows)} cases ok; written: {chosen.out}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
