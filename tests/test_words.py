"""Small words for people."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipeloom.words import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1000 * 2**20, "1000 MiB"),
        (1023.7 * 2**30, "1024 GiB"),
        (64 * 2**20, "64 MiB"),
        (12.345 * 2**30, "12.3 GiB"),
    ],
)
def test_sizes_are_written_without_exponents(size, words):
    assert format_bytes(size) == words


@given(st.integers(1, 2**50))
def test_a_size_that_is_needed_is_never_told_smaller(size):
    told = parse_bytes(format_bytes(size, rounds_up=True).replace(" bytes", ""))
    assert size <= told <= size * 1.011 + 1
    assert abs(parse_bytes(format_bytes(size).replace(" bytes", "")) - size) <= 0.006 * size + 1
