"""A grid of plans for other programs, their exports, and the settings that the exports must contain."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch_runs import CLUSTER, command_of, run_of

from pipeloom.catalog import load_model
from pipeloom.config import RunConfig
from pipeloom.config.run import value_of
from pipeloom.cost.hardware import Cluster
from pipeloom.errors import UserError
from pipeloom.export import Written, hand_over
from pipeloom.export.job import Job, Site, make_job, variable
from pipeloom.planner.plan import make_question, plan
from pipeloom.planner.run_file import run_config
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.launchers import LAUNCHERS, LauncherName

HERE = Path(__file__).parent
PARSERS = Path(sys.prefix) / "parsers"
"""Environment with the parsers, and with a checkout of Megatron-LM."""
MEGATRON = PARSERS / "Megatron-LM"
EACH = 100
"""Exports for each program."""

_TRAININGS: dict[str, tuple[str, int, int, int]] = {
    "mixtral-8x7b": ("dgx-h100", 32, 64, 4096),
    "qwen3-30b-a3b": ("h200", 32, 64, 4096),
    "llama-3-8b": ("dgx-h100", 16, 64, 4096),
    "llama-13b": ("dgx-a100", 32, 128, 2048),
    "llama-30b": ("h200", 32, 96, 2048),
    "llama-3-70b": ("dgx-b200", 64, 128, 4096),
    "gpt-6.6b": ("a100-40gb", 16, 48, 1024),
    "gpt-175b": ("dgx-a100", 128, 256, 2048),
}
"""Model -> cluster, devices, batch in sequences, tokens of a sequence."""
_LIMITS: dict[str, list[dict[str, Any]]] = {
    "megatron": [
        {},
        {"pp": (1,)},
        {"pp": (1,), "tp": (1, 2), "recompute": ("full",)},
        {"pp": (2,), "loops": (1,)},
        {"pp": (2,), "loops": (2, 3, 4)},
        {"pp": (4,), "loops": (1,), "recompute": ("none",)},
        {"pp": (4,), "loops": (2, 3, 5), "micro_batch": (1,)},
        {"pp": (4, 8), "recompute": ("none", "full")},
        {"pp": (4,), "recompute": ("full",), "families": ("depth-first",)},
        {"tp": (8,), "sequence_parallel": (True,)},
        {"tp": (2, 4), "sequence_parallel": (False,)},
        {"shards": ("none",)},
        {"shards": ("optimizer",), "micro_batch": (2, 3, 4)},
    ],
    "torchtitan": [
        {},
        {"pp": (1,)},
        {"pp": (1,), "tp": (1, 2), "shards": ("full",), "recompute": ("full",)},
        {"pp": (1,), "shards": ("gradients",)},
        {"pp": (2,), "loops": (1,)},
        {"pp": (2,), "loops": (2, 3, 4)},
        {"pp": (4,), "families": ("1f1b",)},
        {"pp": (4,), "families": ("gpipe", "breadth-first"), "loops": (1, 2)},
        {"pp": (4, 8), "families": ("zb-h1", "interleaved-zb")},
        {"pp": (2, 4), "families": ("zb-v", "breadth-first"), "loops": (2,)},
        {"pp": (4,), "recompute": ("full",), "shards": ("full",)},
        {"tp": (8,), "sequence_parallel": (True,)},
        {"tp": (2, 4), "sequence_parallel": (False,)},
        {"shards": ("none",), "micro_batch": (2, 3, 4)},
    ],
}
_LLAMA_3_1 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 8192}
_EXPERTS = {"experts": 8, "expert_ffn": 96, "expert_every": 2, "shared_experts": 1}
_GIVEN: dict[str, list[dict[str, Any]]] = {
    "megatron": [
        {"model": {"family": "qwen2"}},
        {"model": {"family": "qwen3", "head_size": 32}},
        {"model": _LLAMA_3_1},
        {"model": {"window": 64, "full_attention_layers": [0, 9]}},
        {
            "model": _EXPERTS | {"balance": "microbatch", "expert_capacity": 1.25},
            "layout": {"dp": 2, "ep": 2, "shard": "optimizer"},
        },
        {
            "model": _EXPERTS | {"family": "qwen3", "balance": "none"},
            "layout": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
        },
        {"model": _EXPERTS, "schedule": {"family": "breadth-first"}},
    ],
    "torchtitan": [
        {"model": {"family": "qwen3", "head_size": 32}},
        {"model": _LLAMA_3_1},
        {"model": {"head_size": 32}},
    ],
}
"""Runs of models that no plan has, as sections of run files."""
UNSET = {"model.norm_eps": 1e-5, "model.rope_theta": 10000.0, "optimizer.lr": 3e-4, "optimizer.lr_warmup_steps": 30}
UNSET |= {"training.steps": 300}
"""Values for settings that a model's file does not have; scripts read them from the environment."""


@dataclass(frozen=True)
class Export:
    """An export of a planned layout.

    Attributes:
        what: the question, in words.
        job: the run.
        written: files and notes.
        command: for ``parse_exports``.
    """

    what: str
    job: Job
    written: Written
    command: dict[str, Any]

    def setting(self, name: str) -> Any:
        """A setting of the run; where the user has to set it, that of ``UNSET``."""
        value = value_of(self.job.config, name)
        return UNSET[name] if value is None else value


def planned_exports(launcher: LauncherName, folder: Path, most: int = EACH) -> list[Export]:
    """The first exports of the grid: row 1 of every plan, then row 2."""
    answers = list[_Answer]()
    for answer in _answers(launcher):
        answers.append(answer)
        if most == 1:
            break
    rows = [(one, place) for place in range(2) for one in answers if len(one.rows) > place]
    return [one.export(place, folder / str(number)) for number, (one, place) in enumerate(rows[:most])]


def given_exports(launcher: LauncherName, folder: Path) -> list[Export]:
    """Exports of runs of models that no plan has."""
    found = []
    for number, given in enumerate(_GIVEN[launcher]):
        sections: dict[str, dict[str, Any]] = {"training": {"dtype": "bfloat16"}}
        for name, value in UNSET.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        for section, settings in given.items():
            sections.setdefault(section, {}).update(settings)
        found.append(_export(str(given), run_of(**sections), CLUSTER, launcher, folder / f"given-{number}"))
    return found


@dataclass(frozen=True)
class _Answer:
    """The layouts of a plan: question in words, model, cluster, program."""

    what: str
    model: str
    cluster: str
    launcher: LauncherName
    rows: list[SimulatedStep]

    def export(self, place: int, folder: Path) -> Export:
        """The export of a row."""
        step = self.rows[place]
        config = run_config(step, self.model, self.cluster, LAUNCHERS[self.launcher].software)
        return _export(f"{self.what}, row {place + 1}", config, step.cluster, self.launcher, folder)


def _export(what: str, config: RunConfig, cluster: Cluster, launcher: LauncherName, folder: Path) -> Export:
    done = hand_over(config, cluster, folder, [launcher])
    assert not done.refused, f"{what}: {done.refused}"
    (written,) = done.written
    own = {variable(name): str(value) for name, value in UNSET.items()}
    places = {"MEGATRON": "/megatron", "DATA": "mock", "TOKENIZER": "/tokenizer", "DATASET": "c4"}
    script = next(file for file in written.files if file.suffix == ".sh")
    words = command_of(script, **own, **places)
    begin = next(at for at, word in enumerate(words) if word.endswith(("pretrain_gpt.py", "torchtitan.train")))
    command = {"words": words[begin + 1 :], "num_devices": config.layout.num_ranks, "folder": str(folder)}
    command |= {"environment": own, "connections": "1" if "connections=1" in script.read_text() else "0"}
    return Export(what, make_job(config, cluster, Site()), written, command)


def _answers(launcher: LauncherName) -> Iterator[_Answer]:
    program = LAUNCHERS[launcher]
    for limits in _LIMITS[launcher]:
        for model, (cluster, devices, batch, seq) in _TRAININGS.items():
            shape = load_model(model, seq)
            if shape.family not in program.model_families or (shape.experts is not None and not program.has_experts):
                continue
            sizes = {"num_devices": devices, "global_batch": batch, "seq": seq}
            question = make_question(model, cluster, launcher=launcher, **sizes, **limits)
            with suppress(UserError):  # no layout divides devices and batch within the limits
                rows = plan(question, 2, explains=False).rows
                yield _Answer(f"{model}, {limits}", model, cluster, launcher, rows)


def parsed(launcher: LauncherName, exports: list[Export]) -> list[dict[str, Any]]:
    """What the program makes of the commands: ``values``, or ``refused`` with its words."""
    more = [str(MEGATRON)] if launcher == "megatron" else []
    done = subprocess.run(
        [str(PARSERS / "bin" / "python"), str(HERE / "parse_exports.py"), launcher, *more],
        check=False,
        input=json.dumps([export.command for export in exports]),
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
