"""Figure 3 of the paper once more, if layers whose activations fit need not be recomputed."""

from reproduction.batch import BATCHES, METHODS, Setting
from reproduction.fastest import fastest
from reproduction.machine import MEGATRON, MODELS, NUM_DEVICES, OWN, Row, described, with_messages


def kept_points() -> list[tuple[str, str, int]]:
    """Model, method and batch of every point, with messages that are cut."""
    return [(model, method, batch) for model in MODELS for method in METHODS for batch in BATCHES]


def kept(model: str, method: str, batch: int) -> Row | None:
    """The best configuration with all layers recomputed, or with none; ``None`` if neither fits."""
    own, megatron = with_messages(OWN, "cut"), with_messages(MEGATRON, "cut")
    setting = Setting(model, batch, recompute=("none", "full"))
    step = fastest(METHODS[method](setting, own, megatron))
    if step is None:
        return None
    keys = {"model": model, "method": method, "batch_per_device": f"{batch / NUM_DEVICES:g}"}
    return {**keys, **described(step), "recompute": step.run.recompute, "mfu": f"{step.mfu:.4f}"}
