"""A lower bound of the step time over all orders of the same work.

A micro-batch passes a chain of operations: forwards and messages up, input gradients and messages down. A weight
gradient follows each input gradient. All operations of one kind on one stage use one lane, which serves one at a time,
and there are ``M`` of them, one for each micro-batch. Number them, in a given schedule, in the order of their starts.

*Heads.* The ``k``-th operation of a link of the chain starts no earlier than ``H(k)``, where

- ``H(k) >= E(k)`` of the link before, with ``E(k) = H(k) + p`` and ``p`` the seconds of that link: before the ``k``-th
  start, ``k`` micro-batches have passed the link before, and the last of these ended it no earlier than ``E(k)``;
- ``H(k) >= H(k - 1) + p``: the lane serves one at a time;
- a forward waits for gathers of its stage and of the earlier stages of its rank, whose first forwards were before it;
- with room for ``c`` inputs of a stage, its ``k``-th forward waits until ``k - c`` of its input gradients have ended.

*Tails.* After the end of the ``j``-th last operation of a link, the step continues for at least ``T(j)``, where

- ``T(j) >= p' + T'(j)`` for every link that follows, since ``j`` operations of it have not started, and the first of
  these to run is at least its ``j``-th last one;
- ``T(j) >= T(j - 1) + p``: the lane;
- after the last weight gradient, the reduction of the stage's gradient; after the last input gradient, also those of
  the earlier stages of its rank, whose last input gradients come later;
- after an input gradient for which a forward waits, what follows that forward.

*Lanes.* A lane has jobs with heads, seconds and tails, so the preemptive schedule of Jackson, which always runs the
available job with the longest tail, ends no later than any schedule of them (Carlier, The one-machine sequencing
problem, EJOR 11, 1982). For ranks this counts the start-up, the work and what follows it; for links, their messages.
The same holds for a resource that actions share: whatever the shares are, between two times it serves no more than its
capacity, and the preemptive schedule meets all deadlines that this allows.

The bound is the longest of all. It ignores, among others, that gathers may be repeated and that several micro-batches
compete for several lanes at once, so the best order may take longer.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from pipeloom.cost.costs import ActionCosts
from pipeloom.errors import UserError
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.lanes import lane_of
from pipeloom.simulation import Sharing


@dataclass(frozen=True)
class ChainSeconds:
    """Seconds of what a micro-batch passes.

    Attributes:
        forward_s: for each stage.
        input_s: for each stage the input gradient, or the whole backward where backwards are not split.
        weight_s: for each stage the weight gradient, 0 where backwards are not split.
        over_s: for each boundary between a stage and the next one, a message.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    over_s: tuple[float, ...]

    @classmethod
    def of(cls, costs: ActionCosts, num_stages: int, *, splits: bool) -> "ChainSeconds":
        """From the costs of actions. Both halves take no longer than a whole backward, in place of which they are."""

        def seconds(kind: Kind, stage: int) -> float:
            return costs.seconds(Action(kind, stage, 0))

        stages = range(num_stages)
        whole_s = [seconds(Kind.BACKWARD, stage) for stage in stages]
        input_s = [min(seconds(Kind.BACKWARD_INPUT, n), whole_s[n]) if splits else whole_s[n] for n in stages]
        return cls(
            forward_s=tuple(seconds(Kind.FORWARD, stage) for stage in stages),
            input_s=tuple(input_s),
            weight_s=tuple(
                min(seconds(Kind.BACKWARD_WEIGHT, n), whole_s[n] - input_s[n]) if splits else 0.0 for n in stages
            ),
            over_s=tuple(seconds(Kind.SEND_F, n) + seconds(Kind.SEND_F.partner, n + 1) for n in stages[:-1]),
        )


@dataclass
class _Link:
    """All operations of one kind on one stage, in the order of their starts.

    Attributes:
        action: kind and stage.
        seconds: of one operation.
        before: the link that precedes it; ``None`` for the first.
        after: links that follow.
        release_s: no operation starts earlier.
        end_s: the step continues for so long after the last operation.
        heads: earliest starts, of the first operation first.
        tails: least seconds after an operation, of the last one first.
    """

    action: Action
    seconds: float
    before: "_Link | None"
    after: "list[_Link]" = field(default_factory=list)
    release_s: float = 0.0
    end_s: float = 0.0
    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Follow the link before."""
        if self.before is not None:
            self.before.after.append(self)


@dataclass(frozen=True)
class _Job:
    """What a lane serves: earliest start, seconds, least seconds after it."""

    action: Action
    head_s: float
    seconds: float
    tail_s: float


def least_step_s(
    schedule: Schedule,
    costs: ActionCosts,
    sharing: Sharing | None = None,
    *,
    splits: bool = True,
    most_inputs: Sequence[int] = (),
) -> float:
    """Lower bound of the seconds of every order of a schedule's work; the proof is in the module's docstring.

    Examples:
        >>> from pipeloom import Costs, make_schedule, simulate
        >>> schedule, costs = make_schedule("1f1b", pp=4, num_microbatches=8), Costs()
        >>> least_step_s(schedule, costs, splits=False), simulate(schedule, costs).end_s
        (33.0, 33.0)
        >>> least_step_s(schedule, costs)
        27.0

    Args:
        schedule: its placement, micro-batches, messages, gathers and reductions are the work; its order does not count.
        costs: seconds of actions.
        sharing: resources that actions share.
        splits: whether backwards may be split into input gradient and weight gradient.
        most_inputs: for each stage the most micro-batches that its rank has room for between forward and input
            gradient; empty for no limit.

    Raises:
        UserError: the schedule has token slices, of which there is no such bound.
    """
    if schedule.num_slices > 1:
        raise UserError(f"the lower bound is of whole micro-batches, found {schedule.num_slices} token slices")
    links = _Links(schedule, costs, splits=splits)
    links.number(schedule.facts.shape[1], most_inputs)
    jobs = list(links.jobs())
    by_lane: dict[Hashable, list[_Job]] = {}
    owner = schedule.placement.rank_by_stage
    for job in jobs:
        rank = owner[job.action.stage]
        by_lane.setdefault((rank, lane_of(job.action, schedule.placement)), []).append(job)
    least_s = max(_jackson_s(own) for own in by_lane.values())
    if sharing is None:
        return least_s
    by_resource: dict[Hashable, list[_Job]] = {}
    for job in jobs:
        for resource_of in (sharing.resource_of, sharing.onward_of):
            if resource_of is not None:
                by_resource.setdefault(resource_of(job.action, owner[job.action.stage]), []).append(job)
    shared = [_jackson_s(own, sharing.capacity[name]) for name, own in by_resource.items() if name is not None]
    return max(least_s, *shared) if shared else least_s


class _Links:
    """The links of a schedule's work.

    Attributes:
        forwards, backwards: by stage, input gradients or whole backwards among the latter.
    """

    def __init__(self, schedule: Schedule, costs: ActionCosts, *, splits: bool) -> None:
        self._costs, self._facts = costs, schedule.facts
        self._chain = ChainSeconds.of(costs, schedule.num_stages, splits=splits)
        self._gathers, self._reductions = dict[int, float](), dict[int, float]()
        self._all: list[_Link] = []
        self._weights: dict[int, _Link] = {}
        self.forwards, self.backwards = dict[int, _Link](), dict[int, _Link]()
        self._add_exchanges()
        last: _Link | None = None
        for stage in range(schedule.num_stages):
            last = self._message(Kind.SEND_F, stage - 1, stage, last)
            last = self.forwards[stage] = self._add(Kind.FORWARD, stage, self._chain.forward_s[stage], last)
            last.release_s = self._up_to(stage, self._gathers)
        for stage in reversed(range(schedule.first_backward_stage, schedule.num_stages)):
            last = self._message(Kind.SEND_B, stage + 1, stage, last)
            last = self._add_backward(stage, last, splits=splits)

    def _seconds(self, kind: Kind, stage: int) -> float:
        return self._costs.seconds(Action(kind, stage, 0))

    def _add(self, kind: Kind, stage: int, seconds: float, before: _Link | None) -> _Link:
        self._all.append(_Link(Action(kind, stage, 0), seconds, before))
        return self._all[-1]

    def _add_exchanges(self) -> None:
        for kind, found in ((Kind.UNSHARD, self._gathers), (Kind.REDUCE_GRAD, self._reductions)):
            stages = {int(self._facts.columns.stage[node]) for node in self._facts.where(kind)}
            found.update((stage, self._costs.seconds(Action(kind, stage))) for stage in sorted(stages))

    def _up_to(self, stage: int, seconds: dict[int, float]) -> float:
        """Sum over the stages of a rank up to this one."""
        owner = self._facts.owner
        return sum(each_s for other, each_s in seconds.items() if other <= stage and owner[other] == owner[stage])

    def _message(self, send: Kind, sender: int, receiver: int, last: _Link | None) -> _Link | None:
        """Send and receive between two stages, if they exchange messages."""
        boundary = min(sender, receiver)
        if last is None or boundary < 0 or max(sender, receiver) >= len(self._facts.owner):
            return last
        if not self._facts.is_received[boundary]:
            return last
        last = self._add(send, sender, self._seconds(send, sender), last)
        return self._add(send.partner, receiver, self._seconds(send.partner, receiver), last)

    def _add_backward(self, stage: int, last: _Link | None, *, splits: bool) -> _Link:
        kind = Kind.BACKWARD_INPUT if splits else Kind.BACKWARD
        link = self._add(kind, stage, self._chain.input_s[stage], last)
        if splits:
            weight = self._add(Kind.BACKWARD_WEIGHT, stage, self._chain.weight_s[stage], link)
            weight.end_s = self._reductions.get(stage, 0.0)
            self._weights[stage] = weight
        link.end_s = self._up_to(stage, self._reductions)
        self.backwards[stage] = link
        return link

    def number(self, count: int, most_inputs: Sequence[int]) -> None:
        """Compute heads and tails."""
        room = {id(self.forwards[stage]): (most_inputs[stage], link) for stage, link in self._limited(most_inputs)}
        freed = {id(link): (most_inputs[stage], self.forwards[stage]) for stage, link in self._limited(most_inputs)}
        for k in range(count):
            for link in self._all:
                head_s = link.release_s if link.before is None else link.before.heads[k] + link.before.seconds
                head_s = max(head_s, link.release_s, link.heads[k - 1] + link.seconds if k else 0.0)
                most, backward = room.get(id(link), (count, link))
                if k >= most:
                    head_s = max(head_s, backward.heads[k - most] + backward.seconds)
                link.heads.append(head_s)
        for j in range(count):
            for link in reversed(self._all):
                tail_s = max(link.end_s, link.tails[j - 1] + link.seconds if j else 0.0)
                tail_s = max([tail_s, *(one.seconds + one.tails[j] for one in link.after)])
                most, forward = freed.get(id(link), (count, link))
                if j >= most:
                    tail_s = max(tail_s, forward.seconds + forward.tails[j - most])
                link.tails.append(tail_s)

    def _limited(self, most_inputs: Sequence[int]) -> list[tuple[int, _Link]]:
        return [(stage, link) for stage, link in self.backwards.items() if most_inputs]

    def jobs(self) -> Iterator[_Job]:
        """All operations with their heads and tails."""
        for link in self._all:
            for head_s, tail_s in zip(link.heads, reversed(link.tails), strict=True):
                yield _Job(link.action, head_s, link.seconds, tail_s)
        for stage, seconds in self._gathers.items():
            first = self.forwards[stage]
            yield _Job(Action(Kind.UNSHARD, stage), 0.0, seconds, first.seconds + first.tails[-1])
        for stage, seconds in self._reductions.items():
            last = self._weights.get(stage, self.backwards.get(stage))
            head_s = 0.0 if last is None else last.heads[-1] + last.seconds
            yield _Job(Action(Kind.REDUCE_GRAD, stage), head_s, seconds, 0.0)


def _jackson_s(jobs: Sequence[_Job], capacity: float = 1.0) -> float:
    """End of Jackson's preemptive schedule of jobs, tails included, on a machine of that speed."""
    coming = sorted(jobs, key=lambda job: job.head_s)
    waiting: list[tuple[float, int, float]] = []  # (minus the tail, number, seconds that are left)
    now, number, last_s = 0.0, 0, 0.0
    while number < len(coming) or waiting:
        if not waiting:
            now = max(now, coming[number].head_s)
        while number < len(coming) and coming[number].head_s <= now:
            heappush(waiting, (-coming[number].tail_s, number, coming[number].seconds / capacity))
            number += 1
        tail, own, left_s = heappop(waiting)
        until = coming[number].head_s if number < len(coming) else inf
        if now + left_s <= until:
            now += left_s
            last_s = max(last_s, now - tail)
        else:
            heappush(waiting, (tail, own, left_s - (until - now)))
            now = until
    return last_s
