"""Traffic between stages beside their compute: from which bandwidth, and from which width, it stops mattering.

The compute of a layer grows with the square of its width, what two stages send each other with the width alone. So wide
models hide their messages on networks where narrow ones wait for them (the square-cube law of SWARM, arXiv 2301.11913).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.placed import Placed, is_inside
from pipeloom.terminal.words import seconds as in_seconds
from pipeloom.terminal.words import short, unit_bytes
from pipeloom.workload.model import ModelShape

_MOST_TIMES = 64
"""How many times as wide a model is looked at."""
_UNIT = 8
"""Widths of heads are multiples of it."""


@dataclass(frozen=True)
class Traffic:
    """Messages between two stages, each beside the forward of a stage.

    Attributes:
        message_bytes: of an activation or its gradient, as it travels.
        message_s: seconds of a message, where it takes longest.
        forward_s: mean seconds of a stage's forward, which is shorter than a backward.
        is_inside: whether pipeline neighbors are on one node.
        link_bytes_per_s: of the link as a cluster file has it.
        fixed_s: seconds of a message that do not depend on its bytes.
        width: of the model.
        enough_width: width from which a forward takes as long as a message, if all sizes of a layer grow with it;
            ``None`` if that is more than 64 times as wide.
    """

    message_bytes: float
    message_s: float
    forward_s: float
    is_inside: bool
    link_bytes_per_s: float
    fixed_s: float
    width: int
    enough_width: int | None

    @property
    def is_hidden(self) -> bool:
        """Whether a stage's forward takes at least as long as a message."""
        return self.message_s <= self.forward_s

    @property
    def enough_bytes_per_s(self) -> float:
        """Bandwidth of the link with which a message takes as long as a forward; infinite if no bandwidth is enough."""
        left_s = self.forward_s - self.fixed_s
        return self.link_bytes_per_s * (self.message_s - self.fixed_s) / left_s if left_s > 0 else inf

    def __str__(self) -> str:
        """One sentence."""
        unit, name = unit_bytes(self.message_bytes)
        where = "inside nodes" if self.is_inside else "between nodes"
        beside = f"{in_seconds(self.message_s)} beside {in_seconds(self.forward_s)} of a stage's forward"
        has_width, now = self.enough_width is not None, f"(now {self.width:,})"
        widths = f"width {self.enough_width:,} {now}" if has_width else f"no width below {_MOST_TIMES * self.width:,}"
        if self.enough_bytes_per_s == inf:
            enough = f"its latency alone takes longer, on any bandwidth; it stops mattering from {widths}"
        else:
            rates = [f"{rate / 1e9:.3g}" for rate in (self.enough_bytes_per_s, self.link_bytes_per_s)]
            bandwidth = f"{rates[0]} GB/s {where} (now {rates[1]})"
            enough = f"{'it matters below' if self.is_hidden else 'it stops mattering from'} {bandwidth}, or {widths}"
        return f"{short(self.message_bytes / unit)} {name} a message, {beside}; {enough}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, in SI units; what no number reaches is null."""
        enough = self.enough_bytes_per_s
        return {
            "message_bytes": self.message_bytes,
            "message_s": self.message_s,
            "forward_s": self.forward_s,
            "is_inside": self.is_inside,
            "enough_bytes_per_s": None if enough == inf else enough,
            "enough_width": self.enough_width,
        }


def boundary_traffic(placed: Placed) -> Traffic | None:
    """The traffic between the stages of a run.

    Returns:
        ``None`` if no link determines it: without a pipeline, in programs that wait for each message, and where the
        processes of a host copy messages.
    """
    run, software, costs = placed.run, placed.software, placed.costs
    crossing = [stage for stage in range(run.num_stages - 1) if placed.placement.crosses(stage)]
    if not crossing or software.is_blocking:
        return None
    slowest = max(crossing, key=costs.over_s)
    ends = placed.placement.rank_by_stage[slowest], placed.placement.rank_by_stage[slowest + 1]
    route, inside = placed.route(*ends), is_inside(placed, *ends)
    if inside and piece_seconds(run, route, software).message_s:
        return None
    link, message_s = route.intra if inside else route.inter, costs.over_s(slowest)
    fixed_s = (link.latency_s + software.efficiency.exchange_s) * (1 if software.is_both_ways else 2)
    return Traffic(
        message_bytes=run.sent_bytes(scatters=software.scatter_gather),
        message_s=message_s,
        forward_s=fmean(costs.forward_s),
        is_inside=inside,
        link_bytes_per_s=link.bytes_per_s,
        fixed_s=min(message_s, fixed_s),
        width=run.shape.hidden,
        enough_width=_enough_width(placed, message_s, fixed_s),
    )


def _enough_width(placed: Placed, message_s: float, fixed_s: float) -> int | None:
    """The smallest width with which a forward takes at least as long as a message.

    Forwards of other widths have the proportions of closed forms, as measured pieces are of one model.
    """
    run, counted = placed.run, replace(placed, cluster=replace(placed.cluster, pieces=()))
    counted_s, forward_s = fmean(counted.costs.forward_s), fmean(placed.costs.forward_s)
    unit = run.shape.heads * _UNIT

    def is_enough(number: int) -> bool:
        wide = _scaled(run.shape, number * unit)
        wide_s = forward_s * fmean(counted.of(run.changed(shape=wide)).costs.forward_s) / counted_s
        return fixed_s + (message_s - fixed_s) * wide.hidden / run.shape.hidden <= wide_s

    number = bisect_left(range(1, _MOST_TIMES * run.shape.hidden // unit), True, key=is_enough) + 1
    return number * unit if is_enough(number) else None


def _scaled(shape: ModelShape, hidden: int) -> ModelShape:
    """The model with another width, and all sizes of a layer in proportion."""
    own = shape.own_head_size
    times = hidden / shape.hidden
    return replace(
        shape,
        hidden=hidden,
        ffn=max(1, round(shape.ffn * times / _UNIT)) * _UNIT,
        own_head_size=None if own is None else max(1, round(own * times / _UNIT)) * _UNIT,
    )
