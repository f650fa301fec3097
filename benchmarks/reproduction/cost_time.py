"""Figures 1 and 4 of the paper: training time against cost, up to 4,096 V100.

The paper extrapolates: utilization is a matter of the batch per device alone, and a larger cluster has more replicas.
Here the best configuration of each method and batch is also searched and simulated on each cluster.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.cost.flops import hardware_flops
from pipeloom.planner.goals import DAY_S, Training
from pipeloom.planner.tradeoff import default_critical_batch
from reproduction.batch import METHODS, Setting, points
from reproduction.fastest import fastest
from reproduction.machine import MEGATRON, MODELS, NUM_DEVICES, OWN, Row, base_run, described, with_messages

SIZES = (64, 256, 1024, 4096)
CRITICAL = {
    "recalled": {"gpt-52b": 6780.0, "gpt-6.6b": 3430.0},
    "fit": {name: default_critical_batch(shape, base_run(name).seq) for name, shape in MODELS.items()},
}
"""Sequences of the critical batch: the paper's, as remembered and not checked, and those of arXiv 2001.08361's fit."""
TOKENS_PER_PARAMETER = 20
"""With small batches; it scales all curves alike."""


def scaled_points() -> list[tuple[str, str, str, int, int]]:
    """Model, messages, method, devices, and sequences of a step on 64 of them; those with 64 are ``batch.points``."""
    return [
        (model, messages, method, devices, batch)
        for devices in SIZES
        if devices > NUM_DEVICES
        for model, messages, method, batch in points()
    ]


def scaled(model: str, messages: str, method: str, devices: int, batch: int) -> Row | None:
    """The best configuration on a larger cluster, of those with as many times more replicas; ``None`` if none fits."""
    setting = Setting(model, batch, devices // NUM_DEVICES)
    own, megatron = with_messages(OWN, messages), with_messages(MEGATRON, messages)
    step = fastest(METHODS[method](setting, own, megatron))
    if step is None:
        return None
    keys = {"model": model, "messages": messages, "method": method, "devices": str(devices)}
    return {**keys, "batch_per_device": f"{batch / NUM_DEVICES:g}", **described(step)}


class Best(NamedTuple):
    """What a method makes of a cluster with its best batch.

    Attributes:
        devices: of the cluster.
        batch_per_device: sequences.
        days: of the training.
    """

    devices: int
    batch_per_device: float
    days: float

    @property
    def device_days(self) -> float:
        """What is paid for."""
        return self.days * self.devices


def training(model: str, critical: str) -> Training:
    """The training of a model with a critical batch of ``CRITICAL``."""
    tokens = TOKENS_PER_PARAMETER * MODELS[model].parameters
    return Training(tokens=tokens, critical_batch=CRITICAL[critical][model])


def curve(
    rows: Sequence[Row], model: str, messages: str, method: str, critical: str, *, is_simulated: bool
) -> list[Best]:
    """A method's best batch on each cluster.

    Args:
        rows: of the best configurations on all clusters (``with_devices``).
        model, messages, method: of ``points``; without a pipeline there are only ``cut`` messages.
        critical: of ``CRITICAL``.
        is_simulated: on each cluster; otherwise utilization is that of 64 devices, as the paper assumes.
    """
    messages = "cut" if method == "no pipeline" else messages
    flops = hardware_flops(MODELS[model], base_run(model).seq, "full")
    chosen = [row for row in rows if (row["model"], row["messages"], row["method"]) == (model, messages, method)]
    needed = training(model, critical)
    found = []
    for devices in SIZES:
        of_size = [row for row in chosen if row["devices"] == str(devices if is_simulated else NUM_DEVICES)]
        options = [
            Best(devices, beta, needed.seconds(round(beta * devices), rate) / DAY_S)
            for row in of_size
            for beta in [float(row["batch_per_device"])]
            for rate in [float(row["tflop_per_s"]) * 1e12 * devices / flops]
        ]
        if options:
            found.append(min(options, key=lambda best: best.days))
    return found


def with_devices(batch: Sequence[Row], larger: Sequence[Row]) -> list[Row]:
    """The best configurations on all clusters."""
    return [*({**row, "devices": str(NUM_DEVICES)} for row in batch), *larger]
