"""The step that a run's profile predicts."""

from collections.abc import Hashable, Sequence
from itertools import cycle

from pipeloom.measure.stages import Profile
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, TIED_RECEIVE_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.simulation import Host, Sharing, simulate
from pipeloom.trace import Trace
from pipeloom.workload.layout import Layout


def predicted_traces(schedules: Sequence[Schedule], profile: Profile) -> list[Trace]:
    """The simulated step of each replica of a profile.

    Args:
        schedules: of each replica that the profile has.
        profile: of the first replica, with those of the others where these differ.
    """
    return [simulate_profile(*one) for one in zip(schedules, (profile, *profile.others), strict=True)]


def update_s(
    layout: Layout, traces: Sequence[Trace], behind_s: float, average_s: float, *, hides_average: bool = False
) -> float:
    """Seconds of a step, or of one update of the replica with most; all replicas wait for the slowest one.

    Args:
        layout: of the run.
        traces: of each replica, or one for all.
        behind_s: of the optimizer behind each of them.
        average_s: of an average of replicas that step alone.
        hides_average: whether it runs in the background of the updates.
    """
    each = zip(layout.updates_by_replica, cycle(traces), strict=False)
    updates_s = max(number * (trace.end_s + behind_s) for number, trace in each)
    return (max(updates_s, average_s) if hides_average else updates_s + average_s) / layout.most_updates


def simulate_profile(schedule: Schedule, profile: Profile) -> Trace:
    """Simulate a schedule with profiled costs; ranks of one host slow each other down as measured, and wait for a core.

    On a CPU the thread that computes also posts the messages, for which it uses the cores, too. The trace has no
    launches, as that of a measured step.
    """

    def host(action: Action, rank: int) -> Hashable | None:
        return profile.host_by_rank[rank] if action.kind in COMPUTE_KINDS else None

    def post_s(action: Action) -> float:
        if action.kind in RECEIVE_KINDS | TIED_RECEIVE_KINDS:
            return profile.receive_s
        return profile.send_s if action.kind in SEND_KINDS | TIED_SEND_KINDS else 0.0

    sharing = Sharing(host, profile.capacity_by_host, profile.turn_s_by_host)
    posting = Host(post_s, run_ahead=1, resource_of=lambda rank: profile.host_by_rank[rank])
    is_posted = profile.receive_s > 0 or profile.send_s > 0
    trace = simulate(schedule, profile.action_costs, sharing, posting if is_posted else None)
    return Trace(trace.spans.take(~trace.spans.on(HOST_LANE.name)), trace.num_ranks)
