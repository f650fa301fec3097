"""The start that all programs share: pipeloom's initial weights, batches, and settings of the optimizer."""

from pathlib import Path
from typing import Any

import tomli_w
import torch

from peers.case import Size
from peers.plain import plain_names
from pipeloom.config import RunConfig
from pipeloom.data.windows import without_marks
from pipeloom.predict.describe import load_run
from pipeloom.training.optimizers.optimizer import learning_rate
from pipeloom.training.session import load_text, resolve
from pipeloom.training.stages import stage_of

RUN, START = "run.toml", "start.pt"


def write_start(size: Size, folder: Path) -> dict[str, Any]:
    """Write pipeloom's run without a layout, and what the other programs read, to a folder.

    Returns:
        What the other programs read: ``model`` is the configuration, ``weights`` have the names of ``PlainLlama``,
        ``batches`` are int64 [steps, batch, seq_len + 1], ``rates`` learning rates by step, ``adamw`` the keyword
        arguments of PyTorch's optimizer, ``clip`` the largest norm of the gradient.
    """
    (folder / RUN).write_text(tomli_w.dumps(size.run()), encoding="utf-8")
    config = load_run(folder / RUN, layout={"pp": 1, "loops": 1})
    data = load_text(config)
    config = resolve(config, data)
    batches = [without_marks(data.train.batch(index, size.batch_size)) for index in range(size.steps)]
    start = {
        "model": config.model,
        "weights": _weights(config),
        "batches": torch.stack([torch.from_numpy(batch) for batch in batches]),
        "microbatch_size": size.microbatch_size,
        "rates": [learning_rate(config.optimizer, step, size.steps) for step in range(size.steps)],
        "adamw": config.optimizer.values,
        "clip": config.optimizer.known_clip_grad_norm,
    }
    torch.save(start, folder / START)
    return start


def _weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """pipeloom's initial weights by the names of a plain llama."""
    whole = stage_of(config, range(config.model.num_layers + 2), "cpu")
    weights = {name: weight.detach() for name, weight in whole.named_parameters()}
    return {own: weights[name] for own, name in plain_names(config.model).items()}
