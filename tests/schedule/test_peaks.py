"""The peaks of a schedule tell what its rows hold, whatever micro-batches keep."""

import hypothesis.strategies as st
import pytest
from families import TRAINING, named_sizes
from hypothesis import given, settings

from pipeloom.families import make_schedule
from pipeloom.schedule.ledger import KeptBytes, Ledger, most_in_rows

BYTES = st.integers(0, 9).map(float)


@settings(max_examples=80, deadline=None)
@given(named_sizes(names=TRAINING), st.integers(1, 5), st.integers(1, 14), st.data())
def test_peaks_hold_what_the_rows_hold_at_most(named, pp, num_microbatches, data):
    name, sizes = named
    schedule = make_schedule(name, pp=pp, num_microbatches=num_microbatches, **sizes)
    sized = st.lists(BYTES, min_size=schedule.num_stages, max_size=schedule.num_stages)
    kept = KeptBytes(data.draw(sized), data.draw(sized))  # with all layers recomputed more waits between the halves
    peaks = schedule.facts.peaks
    assert peaks.stage_inputs == schedule.peak_stage_inputs
    entries = Ledger.of_kept(schedule, kept).most_in_rows(schedule)
    assert most_in_rows(peaks, kept) == most_in_rows(schedule, kept) == entries


@pytest.mark.parametrize("name", ["1f1b", "v-half", "dualpipe-v"])
def test_there_are_no_more_peaks_in_a_longer_step(name):
    loops = 1 if name == "1f1b" else 2
    few, many = (make_schedule(name, pp=4, loops=loops, num_microbatches=count).facts.peaks for count in (16, 160))
    assert [len(states) for states in few.whole] == [len(states) for states in many.whole]
