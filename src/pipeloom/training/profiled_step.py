"""The step that a run's profile predicts."""

from collections.abc import Hashable

from pipeloom.measure.stages import Profile
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS, TIED_RECEIVE_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.simulation import Host, Sharing, simulate
from pipeloom.trace import Trace


def simulate_profile(schedule: Schedule, profile: Profile) -> Trace:
    """Simulate a schedule with profiled costs; ranks of one host slow each other down as measured.

    On a CPU the thread that computes also posts the messages, for which it uses the cores, too. The trace has no
    launches, as that of a measured step.
    """

    def host(action: Action, rank: int) -> Hashable | None:
        return profile.host_by_rank[rank] if action.kind in COMPUTE_KINDS else None

    def post_s(action: Action) -> float:
        if action.kind in RECEIVE_KINDS | TIED_RECEIVE_KINDS:
            return profile.receive_s
        return profile.send_s if action.kind in SEND_KINDS | TIED_SEND_KINDS else 0.0

    sharing = Sharing(host, profile.capacity_by_host)
    posting = Host(post_s, run_ahead=1, resource_of=lambda rank: profile.host_by_rank[rank])
    is_posted = profile.receive_s > 0 or profile.send_s > 0
    trace = simulate(schedule, profile.action_costs, sharing, posting if is_posted else None)
    return Trace(trace.spans.take(~trace.spans.on(HOST_LANE.name)), trace.num_ranks)
