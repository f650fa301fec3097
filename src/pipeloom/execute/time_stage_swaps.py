"""How long stages take between the device and the memory of the host, before the first step."""

from collections.abc import Iterable

import torch

from pipeloom.execute.stage_store import StageStore
from pipeloom.execute.timing import median_seconds
from pipeloom.schedule.stage_swaps import Amounts, Content

_REPEATS = 3


def time_stage_swaps(store: StageStore, stages: Iterable[int], device: torch.device) -> tuple[Amounts, ...]:
    """For each stage the seconds of moving what there is of it.

    One way, as the mean of there and back, while nothing computes; with the room that is made and given back. Stages of
    the same sizes are timed once, and what they are is as before.

    Args:
        store: has the stages, all of them at rest.
        stages: which.
        device: that they visit.
    """
    known: dict[Amounts, Amounts] = {}
    found: list[Amounts] = []
    for stage in stages:
        sizes = store.amounts(stage)
        if sizes not in known:
            known[sizes] = Amounts(
                **{
                    part.name.lower(): _there_and_back(store, stage, part, device) / 2
                    for part in Content
                    if part.name is not None and sizes.of(part)
                }
            )
        found.append(known[sizes])
    return tuple(found)


def _there_and_back(store: StageStore, stage: int, part: Content, device: torch.device) -> float:
    def once() -> None:
        with store.visit(stage, part, part):
            pass

    return median_seconds(once, _REPEATS, device)
