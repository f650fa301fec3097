"""What the settings of a run leave out of the layouts that a plan searches: the rules of run files decide it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeloom.config import RunConfig
from pipeloom.config.any_layout import problems_in_layout
from pipeloom.config.sections import ScheduleConfig
from pipeloom.workload.layout import (
    NO_HALVES,
    ONE_RANK,
    TWO_HALVES,
    TWO_LOOPS,
    TWO_PIPELINES,
    TWO_SHARING,
    TWO_SLICES,
    Layout,
)

Part = Literal["strategy swap", "strategy slices", "ep above 1", "halves in turns", "one group"]
"""Of the layouts that are searched; the last one is a single pipeline rank without replicas."""


class _Probe(NamedTuple):
    """The smallest layout with a part, its schedule, and the same layout without the part."""

    layout: Layout
    without: Layout
    schedule: ScheduleConfig | None = None


_PROBES: dict[Part, _Probe] = {
    "strategy swap": _Probe(TWO_LOOPS, TWO_LOOPS, ScheduleConfig(device_budget="1GB")),
    "strategy slices": _Probe(TWO_SLICES, ONE_RANK),
    "ep above 1": _Probe(TWO_SHARING, TWO_PIPELINES),
    "halves in turns": _Probe(TWO_HALVES, NO_HALVES),
    "one group": _Probe(ONE_RANK, TWO_PIPELINES),
}


@dataclass(frozen=True)
class LeftOut:
    """Parts of layouts that are not searched.

    Attributes:
        reasons: (part, sentence of the rules of run files).
    """

    reasons: tuple[tuple[Part, str], ...] = ()

    def why(self, part: str) -> list[str]:
        """Why a part is not searched, a sentence each; empty if it is."""
        return [sentence for one, sentence in self.reasons if one == part]

    def problems(self, named: Iterable[Part]) -> Iterator[str]:
        """A sentence for each reason against the parts that a question names all the same."""
        for part in named:
            yield from (f"{part} cannot be searched: {sentence}" for sentence in self.why(part))


def unpriced(config: RunConfig) -> dict[str, str]:
    """Settings that no layout of a search is priced with, with a sentence each; empty if the search prices the run."""
    layout = config.layout
    found = {
        "training.freeze_layers": (config.training.freeze_layers, "layouts that train all weights", "frozen layers"),
        "layout.average_every": (layout.average_every, "reductions of gradients", "averages"),
        "layout.microbatches": (layout.microbatches, "equal numbers of micro-batches", "unequal numbers"),
        "model.share_layers": (config.model.share_layers, "layers with own weights", "shared layers"),
    }
    return {
        name: f"{name}: the search prices {priced}; leave it out (`pipeloom simulate` prices one layout with {instead})"
        for name, (value, priced, instead) in found.items()
        if value is not None
    }


def left_out(config: RunConfig) -> LeftOut:
    """What a run's optimizer and training leave out.

    What its model, text and adapters leave out is decided by the question, which may have no run file.
    """
    # The rules of experts have to be reached if the question has another model.
    model = replace(config.model, experts=config.model.experts or 2)
    config = replace(config, model=model)
    plain = replace(RunConfig(), model=model, data=config.data, adapter=config.adapter)
    return LeftOut(
        tuple((part, sentence) for part, probe in _PROBES.items() for sentence in _against(probe, config, plain))
    )


def _against(probe: _Probe, config: RunConfig, plain: RunConfig) -> list[str]:
    """Problems that only this run has, and only with the part."""
    without = problems_in_layout(config, probe.without, is_model_known=False)
    own, general = (
        problems_in_layout(one, probe.layout, probe.schedule, is_model_known=False) for one in (config, plain)
    )
    return [one for one in own if one not in {*without, *general}]
