"""The benchmark of moved activations: all ways compute the same, and what it reports of them is theirs."""

from balance import Case, evict_seconds, peaks, predicted_peaks, run_case, step_times, targets_of
from pipeloom.schedule import Kind

CASE = Case(num_microbatches=6, forward_s=0.002, backward_s=0.004, kept_bytes=300_000)


def test_all_ways_make_the_same_gradients_and_two_of_them_move_something():
    found = run_case(CASE, repetitions=1)
    schedules = CASE.schedules()
    assert list(found) == list(schedules) == ["1F1B", "balanced", "offloaded"]
    assert len({tuple(rank.gradient for rank in ran) for ran in found.values()}) == 1
    assert [sum(row.is_kind(Kind.EVICT, Kind.OFFLOAD).sum() for row in one.rows) > 0 for one in schedules.values()] == [
        False,
        True,
        True,
    ]
    assert [evict_seconds(ran) > 0 for ran in found.values()] == [False, True, True]
    assert all(len(step_times(ran)) == 1 and step_times(ran)[0] > 0 for ran in found.values())
    assert len(targets_of(CASE, found)) == 2
    each = CASE.kept_bytes + CASE.message.nbytes
    assert peaks(found["1F1B"]) == [count * each for count in (4, 3, 2, 1)]
    assert predicted_peaks(CASE, schedules["1F1B"], 0.0) == [count * each for count in (4, 3, 2, 1)]
    assert predicted_peaks(CASE, schedules["balanced"], 0.001)[0] == 3 * each
