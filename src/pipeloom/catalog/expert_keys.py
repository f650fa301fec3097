"""Keys of experts in files of the catalog's format: of models, and of measured layers."""

from typing import Any

from pipeloom.catalog.reading import Reader
from pipeloom.workload.model_shape import Experts


def read_experts(reader: Reader, ffn: int) -> Experts | None:
    """The experts of layers, whose feed-forward blocks are otherwise this wide; ``None`` for a table without."""
    if "experts" not in reader.names():
        reader.needs("experts", "experts_per_token", "expert_ffn", "expert_every", "shared_experts")
        return None
    found = Experts(
        count=reader.integer("experts"),
        per_token=reader.integer("experts_per_token", 2),
        ffn=reader.integer("expert_ffn", ffn),
        every=reader.integer("expert_every", 1),
        shared=reader.integer("shared_experts") if "shared_experts" in reader.names() else 0,
    )
    if not reader.has_problems and found.per_token > found.count:
        reader.complain(f"experts_per_token must be at most experts {found.count}, found {found.per_token}")
    return found


def expert_keys(experts: Experts | None) -> dict[str, Any]:
    """The keys and values that ``read_experts`` reads."""
    if experts is None:
        return {}
    keys = {"experts": experts.count, "experts_per_token": experts.per_token, "expert_ffn": experts.ffn}
    return {
        **keys,
        **({"expert_every": experts.every} if experts.every > 1 else {}),
        **({"shared_experts": experts.shared} if experts.shared else {}),
    }
