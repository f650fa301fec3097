"""What is made of times: medians, spreads, links, bus bandwidths."""

import pytest
from machines import messages, timing

from pipeloom.measure.findings import Collectives, Timing, fit_line


def test_a_timing_is_the_median_with_the_distance_of_the_quartiles():
    found = Timing.of([5, 1, 2, 4, 3])
    assert found.median_s == 3
    assert found.spread == pytest.approx(2 / 3)
    assert found.repeats == 5


def test_the_median_gets_surer_with_the_root_of_the_repeats():
    few, many = Timing(1.0, 0.1, 4), Timing(1.0, 0.1, 400)
    assert few.uncertainty == pytest.approx(10 * many.uncertainty)
    assert few.uncertainty == pytest.approx(0.0465)


def test_a_line_is_found_again():
    latency_s, seconds_per_byte = fit_line([(x, 5e-5 + x / 3e9) for x in (4e3, 3e4, 2e5, 2e6, 2e7)])
    assert latency_s == pytest.approx(5e-5)
    assert 1 / seconds_per_byte == pytest.approx(3e9)


def test_small_messages_count_as_much_as_large_ones():
    """A large message that is 50 % slower must not hide the latency."""
    latency_s, _ = fit_line([(x, (5e-5 + x / 1e9) * (1.5 if x == 1e8 else 1)) for x in (1e3, 1e4, 1e5, 1e8)])
    assert latency_s == pytest.approx(5e-5, rel=0.1)


@pytest.mark.parametrize(
    "points",
    [[(1e3, 1e-6), (1e6, 1e-2), (1e7, 1.0)], [(1e3, 1e-3), (1e6, 2e-4), (1e7, 1e-4)], [(1.0, 1.0), (2.0, 1.0)]],
)
def test_a_line_never_has_a_negative_latency_or_an_endless_bandwidth(points):
    latency_s, seconds_per_byte = fit_line(points)
    assert latency_s >= 0
    assert seconds_per_byte > 0


def test_the_bandwidth_of_several_pairs_is_their_sum():
    one, four = messages().link, messages(num_pairs=4).link
    assert four.bytes_per_s == pytest.approx(4 * one.bytes_per_s) == pytest.approx(4e9)
    assert four.latency_s == pytest.approx(one.latency_s) == pytest.approx(1e-4)
    assert messages(num_pairs=4).worst_error < 1e-9


@pytest.mark.parametrize(("kind", "expected"), [("all_reduce", 1.5e6), ("all_gather", 0.75e6)])
def test_bus_bandwidth_is_counted_as_nccl_tests_do(kind, expected):
    assert Collectives(kind, 4, ((1e6, timing(1.0)),)).bus == ((1e6, pytest.approx(expected)),)
