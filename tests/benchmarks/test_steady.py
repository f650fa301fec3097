"""A run takes no more descriptors with its steps; 2,000 of them are ``make steady``."""

import pytest

from steady import measure


@pytest.mark.long
def test_descriptors_stay_the_same(tmp_path):
    samples, times_s = measure(tmp_path, 60)
    assert len(times_s) == 60
    counts = [descriptors for step, _, descriptors in samples if step >= 20]
    assert len(counts) >= 2
    # A checkpoint that is being written has its files open.
    assert max(counts) - min(counts) <= 24
