"""Layers that share one set of weights: which do, and which stages have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Sharing:
    """Groups of consecutive layers with one set of weights each; the first layer of a group gives them their names.

    Attributes:
        num_layers: of the model.
        num_distinct: sets of weights; it divides the number of layers.
    """

    num_layers: int
    num_distinct: int

    @property
    def size(self) -> int:
        """Layers that share one set of weights."""
        return self.num_layers // self.num_distinct

    def owner(self, layer: int) -> int:
        """The first layer of the group of a layer."""
        return layer - layer % self.size

    @property
    def owners(self) -> range:
        """The first layer of each group."""
        return range(0, self.num_layers, self.size)

    def group(self, owner: int) -> range:
        """The layers that share the weights of a group's first one."""
        return range(owner, owner + self.size)

    @cached_property
    def alike(self) -> tuple[range, ...]:
        """The layers of each group."""
        return tuple(map(self.group, self.owners))


_LAYERS = "layers."


def is_of_layer(name: str) -> bool:
    """Whether a parameter is one of a layer."""
    return name.startswith(_LAYERS)


def layer_names(name: str, sharing: Sharing | None) -> list[str]:
    """The names that a parameter would have in each of the layers that share it; the first is its own.

    Args:
        name: of a parameter of the model.
        sharing: of its layers; ``None`` if each has its own.
    """
    if sharing is None or not is_of_layer(name):
        return [name]
    number, rest = name.removeprefix(_LAYERS).split(".", 1)
    return [f"{_LAYERS}{layer}.{rest}" for layer in sharing.group(int(number))]


def shared_name(name: str, sharing: Sharing) -> str:
    """The parameter that a layer's parameter is: that of the first layer that shares it."""
    if not is_of_layer(name):
        return name
    number, rest = name.removeprefix(_LAYERS).split(".", 1)
    return f"{_LAYERS}{sharing.owner(int(number))}.{rest}"


@lru_cache(maxsize=1024)
def stages_of_owners(sharing: Sharing, layers_by_stage: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """First layer of each group -> the stages with layers of the group.

    Args:
        sharing: of the layers.
        layers_by_stage: number of layers of each stage.
    """
    found: dict[int, list[int]] = {owner: [] for owner in sharing.owners}
    for stage, (begin, end) in enumerate(pairwise(accumulate(layers_by_stage, initial=0))):
        for owner in sorted({sharing.owner(layer) for layer in range(begin, end)}):
            found[owner].append(stage)
    return {owner: tuple(stages) for owner, stages in found.items()}


def ranks_of_owners(
    sharing: Sharing, layers_by_stage: tuple[int, ...], rank_by_stage: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """First layer of each group that lies in several stages -> the pipeline ranks that have it.

    Groups within one stage are left out: their weights are parameters of the stage.

    Args:
        sharing: of the layers.
        layers_by_stage: number of layers of each stage.
        rank_by_stage: pipeline rank of each stage.
    """
    return {
        owner: tuple(sorted({rank_by_stage[stage] for stage in stages}))
        for owner, stages in stages_of_owners(sharing, layers_by_stage).items()
        if len(stages) > 1
    }
