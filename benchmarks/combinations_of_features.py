"""Which features of a run work together: the table of docs/combinations.md.

``python benchmarks/combinations_of_features.py`` writes the page's tables from the rules that read a run file. A test
compares the page with the rules, and trains a step with every pair that they accept (``tests/conformance``).
"""

from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeloom.config import RunConfig, find_problems
from pipeloom.config.file import parse_run
from reproduction.tables import fill, table

PAGE = Path(__file__).parent.parent / "docs" / "combinations.md"
Settings = Mapping[str, Any]
"""Key of a run file, with its section -> value."""

BASE: Settings = {
    "model.family": "llama",
    "model.num_layers": 4,
    "model.hidden_size": 16,
    "model.num_heads": 4,
    "model.ffn_size": 32,
    "data.seq_len": 16,
    "layout.pp": 1,
    "layout.loops": 1,
    "layout.microbatch_size": 1,
    "layout.num_microbatches": 4,
}
PIPELINE: Settings = {"layout.pp": 2, "layout.loops": 2}
FEATURES: dict[str, Settings] = {
    "pipeline": PIPELINE,
    "replicas": {"layout.dp": 2},
    "sharded state": {"layout.dp": 2, "layout.shard": "optimizer"},
    "fully sharded": {"layout.dp": 2, "layout.shard": "full"},
    "tensor and sequence parallelism": {"layout.tp": 2, "layout.sequence_parallel": True},
    "context parallelism": {"layout.cp": 2},
    "token slices": {"layout.token_slices": 2},
    "recomputation": {"layout.recompute": "full"},
    "attention within documents": {"data.attention": "document"},
    "tied embedding": {"model.tied": True},
    "split backward": {**PIPELINE, "schedule.family": "interleaved-zb"},
    "activations to partners": {**PIPELINE, "schedule.balance": True},
    "activations to the host": {"schedule.offload": True, "schedule.activation_budget": "150KB", "layout.loops": 2},
    "stages in host memory": {"schedule.device_budget": "200KB", "layout.loops": 6},
    "messages in 8 bits": {**PIPELINE, "layout.boundary": "int8"},
    "own micro-batches": {"layout.dp": 2, "layout.microbatches": [3, 1], "layout.num_microbatches": 3},
    "frozen layers": {"training.freeze_layers": 1},
    "adapters": {"adapter.rank": 2},
    "experts": {"model.experts": 4, "model.experts_per_token": 2, "model.balance": "microbatch"},
    "a capacity of experts": {
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.balance": "microbatch",
        "model.expert_capacity": 0.75,
    },
    "experts over ranks": {
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.balance": "microbatch",
        "layout.dp": 2,
        "layout.ep": 2,
    },
    "experts by biases": {"model.experts": 4, "model.experts_per_token": 2, "model.balance": "bias"},
    "halves in turns": {
        "model.experts": 4,
        "model.experts_per_token": 2,
        "model.balance": "none",
        "layout.dp": 2,
        "layout.ep": 2,
        "layout.ep_overlap": True,
        "layout.microbatch_size": 2,
    },
    "shared layers": {"model.share_layers": 2},
    "kept blocks": {"model.density": 0.5, "model.density_block": 4},
    "averaged replicas": {"layout.dp": 2, "layout.average_every": 2},
    "muon": {"optimizer.name": "muon"},
    "adalomo": {"optimizer.name": "adalomo"},
    "clipped stages": {"optimizer.clip": "stage"},
    "updates within the step": {"optimizer.update": "stage", "optimizer.clip": "none"},
    "bfloat16 weights alone": {
        "optimizer.name": "lomo",
        "optimizer.wide_weights": False,
        "training.dtype": "bfloat16",
    },
    "z-loss": {"training.z_loss": 0.01},
}
"""Name -> settings that turn a feature on."""


def settings_of(*names: str) -> Settings | None:
    """The settings of the run with these features; ``None`` if two of them need different ones."""
    settings = dict(BASE)
    for number, name in enumerate(names):
        for key, value in FEATURES[name].items():
            if any(FEATURES[other].get(key, value) != value for other in names[:number]):
                return None
            settings[key] = value
    return settings


def config_of(*names: str) -> tuple[RunConfig | None, list[str]]:
    """The run with these features, and what is wrong with it; no run if two of them need different settings."""
    settings = settings_of(*names)
    if settings is None:
        return None, []
    tree: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, setting = key.partition(".")
        tree.setdefault(section, {})[setting] = value
    config, problems = parse_run(tree)
    return config, [*problems, *find_problems(config)]


@cache
def pairs() -> Mapping[tuple[str, str], list[str] | None]:
    """Each pair of features with the sentences that refuse it; ``None`` for settings that exclude each other."""
    found = {pair: config_of(*pair) for pair in combinations(FEATURES, 2)}
    return {pair: None if config is None else problems for pair, (config, problems) in found.items()}


def blocks() -> dict[str, str]:
    """The tables of the page."""
    found = pairs()
    names = list(FEATURES)
    head = ("", *(str(number + 1) for number in range(len(names) - 1)))
    mark = {pair: "." if reasons is None else "no" if reasons else "yes" for pair, reasons in found.items()}
    lines = []
    for number, name in enumerate(names):
        marks = [mark[other, name] for other in names[:number]]
        lines.append([f"{number + 1} {name}", *marks, *[""] * (len(names) - 1 - number)])
    reasons: dict[str, list[str]] = {}
    for (one, other), sentences in found.items():
        for sentence in sentences or ():
            reasons.setdefault(sentence, []).append(f"{names.index(one) + 1} with {names.index(other) + 1}")
    return {
        "pairs": table(head, lines),
        "reasons": table(("refused", "with"), [[", ".join(where), sentence] for sentence, where in reasons.items()]),
    }


def main() -> None:
    """Write the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
